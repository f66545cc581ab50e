"""A finding: one change that is worth making, with its gain and the evidence for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

MIN_ANSWERS: Final = 100.0
"""Answers that a rule needs at least."""
LEAST_GAIN: Final = 0.01
"""Gain below which a change is not worth a restart."""


@dataclass(frozen=True, slots=True)
class Gain:
    """An expected gain, with a 95% interval."""

    share: float  # share that is saved of `of`, 0 to 1
    low: float
    high: float
    of: str  # what is saved, such as "time per output token"

    @property
    def is_worth_it(self) -> bool:
        """Whether the gain is worth a restart at the lower end of the interval too.

        Of several settings the best is named, whose gain luck has made larger: an end just above nought says nothing.
        """
        return self.low >= LEAST_GAIN


def gain_of(draws: npt.NDArray[np.float64], of: str) -> Gain:
    """Return the gain from draws of its distribution."""
    low, high = np.percentile(draws, (2.5, 97.5))
    return Gain(float(np.median(draws)), float(low), float(high), of)


@dataclass(frozen=True, slots=True)
class Finding:
    """One change that is worth making."""

    rule: str  # name of the rule
    model: str
    backend: str
    title: str
    gain: Gain | None  # None where no gain can be calculated
    evidence: str  # what the finding rests on
    change: str  # the exact lines to change
    worth: str = ""  # what the change brings, where no gain can be calculated


@runtime_checkable
class Advisor(Protocol):
    """A room that has findings of its own."""

    def findings(self, model: str) -> Sequence[Finding]:
        """Return what it advises to change in the replicas of a model."""


@runtime_checkable
class Comparer(Protocol):
    """A room that compares methods on live traffic."""

    def compared(self, model: str) -> frozenset[frozenset[str]]:
        """Return the pairs of methods of which it is known which is better."""


def lines(model: str, backend: str, *changes: str) -> str:
    """Return lines of a pool file that set something of a backend."""
    return "\n".join(
        ["models:", f"  {model}:", "    backends:", f"      {backend}:", *(f"        {one}" for one in changes)]
    )


def flag_change(model: str, backend: str, flags: Sequence[str] | None, flag: str, value: str) -> str:
    """Return how to set a flag of an engine: in the pool file if the gateway starts it, else on its command line."""
    if flags is None:
        return f"vllm serve ... {flag} {value}"
    return lines(model, backend, "serve:", f'  flags: [..., "{flag}", "{value}"]')
