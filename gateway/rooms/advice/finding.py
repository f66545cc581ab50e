"""A finding: one change worth making, with its gain in time and the evidence for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from policies.learned.replica import Load

Floats = npt.NDArray[np.float64]

OF: Final = "time per output token"
MIN_ANSWERS: Final = 100.0
"""Fewest answers that a rule needs."""
LEAST_GAIN: Final = 0.01
"""Gain below which a change is not worth a restart."""
_ROUNDS: Final = 40
_LARGEST: Final = 100.0


@dataclass(frozen=True, slots=True)
class Gain:
    """An expected gain, with its interval."""

    share: float  # saved share of `of`, up to 1; negative if it costs
    low: float
    high: float
    of: str  # what is saved, such as "time per output token"
    confidence: float = 0.95

    @property
    def is_worth_it(self) -> bool:
        """Whether the gain is worth a restart even at the lower end of the interval.

        The best of several settings is advised, whose gain chance inflates: a lower end just above zero means nothing.
        """
        return self.low >= LEAST_GAIN


def gain_of(draws: Floats, of: str) -> Gain:
    """Return the gain from draws of its distribution."""
    low, high = np.percentile(draws, (2.5, 97.5))
    return Gain(float(np.median(draws)), float(low), float(high), of)


def relative_time(load: Load, present_s: float, step_s: Callable[[Floats], Floats], fewer: Floats) -> Floats:
    """Return draws of the ratio of the time per token after a change to the current one.

    Slower answers mean more requests in the batch, by Little's law, and slower steps more prompts in each: both are
    solved for. `step_s` returns the seconds of steps: the four numbers of a `StepCost` times those passed to it.
    """
    ratio = np.ones_like(fewer)
    for _ in range(_ROUNDS):
        loads = np.stack([np.ones_like(ratio), load[0] * ratio, load[1] * ratio, load[2] * ratio / fewer])
        ratio = np.clip(0.5 * (ratio + step_s(loads) / present_s * fewer), 1.0 / _LARGEST, _LARGEST)
    return ratio


@dataclass(frozen=True, slots=True)
class Finding:
    """One change worth making."""

    rule: str  # name of the rule
    model: str
    backend: str
    title: str
    gain: Gain | None  # None if it cannot be calculated
    evidence: str  # basis of the finding
    change: str  # the exact lines to change
    worth: str = ""  # benefit of the change, if no gain can be calculated


@runtime_checkable
class Advisor(Protocol):
    """A room with findings of its own."""

    def findings(self, model: str) -> Sequence[Finding]:
        """Return the changes that it advises for the replicas of a model."""


@runtime_checkable
class Comparer(Protocol):
    """A room that compares methods on live traffic."""

    def compared(self, model: str) -> frozenset[frozenset[str]]:
        """Return the pairs of methods whose comparison is running or has an answer."""

    def comparing(self, model: str) -> str:
        """Return a sentence on the running comparison and its result so far; empty without one."""


def lines(model: str, backend: str, *changes: str) -> str:
    """Return lines of a pool file that change settings of a backend."""
    return "\n".join(
        ["models:", f"  {model}:", "    backends:", f"      {backend}:", *(f"        {one}" for one in changes)]
    )


def flag_change(model: str, backend: str, flags: Sequence[str] | None, flag: str, value: str) -> str:
    """Return how to set a flag of an engine: in the pool file if the gateway starts it, else on its command line."""
    if flags is None:
        return f"vllm serve ... {flag} {value}"
    return lines(model, backend, "serve:", f'  flags: [..., "{flag}", "{value}"]')
