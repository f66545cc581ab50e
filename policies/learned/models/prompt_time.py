"""The time that a backend takes to compute a token of a long prompt, learned from the time to the first token."""

from __future__ import annotations

import math
from typing import Final

LEAST_TOKENS: Final = 2048
"""Prompt tokens to compute from which the time to the first token is mostly that of computing them."""


class PromptTime:
    """Seconds per prompt token of one backend.

    The times of an answer's steps tell it too, but badly where prompts are long: which of the prompts sent meanwhile
    were computed during those steps is then hardly known.

    Examples
    --------
    >>> time = PromptTime()
    >>> time.token_s(2e-5)
    2e-05
    >>> for _ in range(100):
    ...     time.learn(seconds=2.0, tokens=50_000)
    >>> round(time.token_s(2e-5), 6)
    3.9e-05
    """

    def __init__(self) -> None:
        self._log_s = 0.0
        self._count = 0.0

    def token_s(self, fitted_s: float) -> float:
        """Return the seconds per prompt token; those fitted to step times count as one observation."""
        if not self._count:
            return fitted_s
        return math.exp((math.log(max(1e-9, fitted_s)) + self._count * self._log_s) / (1.0 + self._count))

    def learn(self, seconds: float, tokens: float) -> None:
        """Add the time that a prompt took; errors beyond a factor of three count as that."""
        if tokens < LEAST_TOKENS or seconds <= 0.0:
            return
        error = math.log(seconds / tokens) - self._log_s
        if self._count:
            error = min(max(error, -_MOST_ERROR), _MOST_ERROR)
        self._count = min(_MOST, self._count + 1.0)
        self._log_s += error / self._count


_MOST: Final = 50.0
_MOST_ERROR: Final = math.log(3.0)
