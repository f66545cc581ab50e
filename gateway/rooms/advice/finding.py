"""A finding: one change that is worth making, with its gain in time and the evidence for it."""

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
"""Answers that a rule needs at least."""
LEAST_GAIN: Final = 0.01
"""Gain below which a change is not worth a restart."""
_ROUNDS: Final = 40
_LARGEST: Final = 100.0


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


def gain_of(draws: Floats, of: str) -> Gain:
    """Return the gain from draws of its distribution."""
    low, high = np.percentile(draws, (2.5, 97.5))
    return Gain(float(np.median(draws)), float(low), float(high), of)


def relative_time(load: Load, present_s: float, step_s: Callable[[Floats], Floats], fewer: Floats) -> Floats:
    """Return draws of the time per token after a change over the present one.

    Slower answers mean more requests in the batch, by Little's law, and slower steps more prompts in each: both are
    solved for. `step_s` returns the seconds of steps, as the four numbers of a `StepCost` times those given to it.
    """
    ratio = np.ones_like(fewer)
    for _ in range(_ROUNDS):
        loads = np.stack([np.ones_like(ratio), load[0] * ratio, load[1] * ratio, load[2] * ratio / fewer])
        ratio = np.clip(0.5 * (ratio + step_s(loads) / present_s * fewer), 1.0 / _LARGEST, _LARGEST)
    return ratio


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

    def comparing(self, model: str) -> str:
        """Return what is being compared, and what that has shown so far; empty if nothing is."""


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
