"""What was measured, and how it is set up again: cases, the groups they are compared in, and the parts of the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

from backends.speculation import Method

Part = Literal["fit", "report"]


class Group(NamedTuple):
    """Runs that differ in the method alone. One of them, the baseline, is what the others are compared with."""

    setup: str
    """The calibration, or `sglang/MODEL`; see `setups`."""
    source: str
    workload: str
    load: str


@dataclass(frozen=True, slots=True)
class Closed:
    """Clients that each send their next request when the last has ended."""

    concurrency: int
    requests: int


@dataclass(frozen=True, slots=True)
class Open:
    """Poisson arrivals."""

    rate_per_s: float
    requests: int


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked and answered.

    Parameters
    ----------
    kind
        Kind of text, one of `backends.calibration.calibration.Kind`.
    prompt_tokens, output_tokens
        Mean lengths, for scripts without a text; the spread around them is the log's standard deviation.
    texts
        Name of a collection of real texts (see `texts`), for the methods that draft from the text.
    shared
        Share of the prompt that all requests have in common.
    """

    kind: str
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    spread: float = 0.5
    texts: str | None = None
    shared: float = 0.0


@dataclass(frozen=True, slots=True)
class Given:
    """Acceptance that was measured in the run itself.

    Parameters
    ----------
    share
        Share of a request's steps that verify a draft.
    survival
        Of those, the share in which the draft's token 1, 2, ... was accepted; falling.
    drafted
        Mean tokens of a draft.
    """

    share: float
    survival: tuple[float, ...]
    drafted: float

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step emits."""
        return 1 + self.share * sum(self.survival)


@dataclass(frozen=True, slots=True)
class Case:
    """One run.

    Parameters
    ----------
    label
        The method as the source names it, with k.
    measured
        By quantity; see `play.Figures` for their names. `speedup` where the source gives no more.
    speed
        The quantity that speedups are computed from.
    inverse
        Whether less of it is faster.
    given
        Acceptance as measured; None where none was published.
    """

    group: Group
    label: str
    method: Method
    config: Mapping[str, Any]
    load: Closed | Open
    work: Work
    measured: Mapping[str, float]
    speed: str = "output_tok_s"
    inverse: bool = False
    temperature: float = 0.0
    given: Given | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_baseline(self) -> bool:
        """Whether the others of its group are compared with it."""
        return self.method is Method.BASELINE


@dataclass(frozen=True, slots=True)
class Figure:
    """Something measured that takes no run to compute: the calibration says it, or a formula does."""

    source: str
    what: str
    quantity: str
    measured: float
    simulated: float


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Rows that are not set up, and why."""

    source: str
    what: str
    rows: int
    reason: str


@dataclass(slots=True)
class Collected:
    """All that a source holds."""

    cases: list[Case] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def __iadd__(self, other: Collected) -> Collected:
        self.cases += other.cases
        self.figures += other.figures
        self.left_out += other.left_out
        return self


def parts(groups: Iterable[Group]) -> dict[Group, Part]:
    """Return which part each group belongs to.

    The groups of a setup go alternately to the part that parameters may be fitted on and to the part that is only
    reported. They are ordered by source, workload and load (numbers by value), those whose load is not stated last:
    little can be fitted on them. So each setup has something to be fitted on; one with a single group has nothing to
    report.
    """
    found: dict[Group, Part] = {}
    for _, of_setup in groupby(sorted(set(groups), key=_order), key=lambda group: group.setup):
        for index, group in enumerate(of_setup):
            found[group] = "report" if index % 2 else "fit"
    return found


def _order(group: Group) -> tuple[str, str, bool, str, float, str]:
    digits = "".join(character for character in group.load if character.isdigit() or character == ".")
    size = float(digits) if digits else float("inf")
    return (group.setup, group.source, not digits, group.workload, size, group.load)


def geometric_survival(accepted: float, k: int) -> tuple[float, ...]:
    """Return survival a, a^2, ..., a^k that sums to `accepted`: one rate for every position, found by bisection.

    Raises
    ------
    ValueError
        If more are accepted than drafted.
    """
    if not 0 <= accepted <= k:
        raise ValueError(f"{accepted:.3f} accepted of {k} drafted")
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**j for j in range(1, k + 1)) < accepted else (low, rate)
    return tuple(low**j for j in range(1, k + 1))
