"""Measured cases and how to reproduce them, the groups in which they are compared, and the parts of the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, NamedTuple

from backends.speculation import Method

Part = Literal["fit", "report"]


class Group(NamedTuple):
    """Runs that differ only in the method; the others are compared with the baseline among them."""

    setup: str
    """Calibration, or `sglang/MODEL`; see `setups`."""
    source: str
    workload: str
    load: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed loop: clients that send their next request when the last has ended."""

    concurrency: int
    requests: int


@dataclass(frozen=True, slots=True)
class Open:
    """Poisson arrivals."""

    rate_per_s: float
    requests: int


@dataclass(frozen=True, slots=True)
class Work:
    """The prompts and answers of a case.

    Parameters
    ----------
    kind
        Kind of text, one of `backends.calibration.calibration.Kind`.
    prompt_tokens, output_tokens
        Mean lengths, for scripts without a text; `spread` is the standard deviation of their logarithms, of outputs
        `output_spread` if that is given.
    texts
        Name of a collection of real texts (see `texts`), for methods that draft from the text.
    shared
        Share of the prompt that is common to all requests.
    """

    kind: str
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    spread: float = 0.5
    output_spread: float | None = None
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
        Share of these steps that accepted the draft's token 1, 2, ...; non-increasing.
    drafted
        Mean number of tokens in a draft.
    """

    share: float
    survival: tuple[float, ...]
    drafted: float

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens emitted per step."""
        return 1 + self.share * sum(self.survival)


@dataclass(frozen=True, slots=True)
class Case:
    """One run.

    Parameters
    ----------
    label
        Method as the source names it, with k.
    measured
        Values by quantity; see `play.Played` for the names. `speedup` if the source gives no more.
    speed
        Quantity from which speedups are computed.
    inverse
        Whether a lower value of it is faster.
    given
        Measured acceptance; None if it was not published.
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
        """Whether the other runs of its group are compared with it."""
        return self.method is Method.BASELINE

    @property
    def is_adaptive(self) -> bool:
        """Whether the engine chooses how many drafts to verify."""
        return bool(self.config.get("enable_adaptive_verification"))


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure that needs no run: it follows from the calibration or from a formula."""

    source: str
    what: str
    quantity: str
    measured: float
    simulated: float


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Rows that are not reproduced, and the reason."""

    source: str
    what: str
    rows: int
    reason: str


@dataclass(slots=True)
class Collected:
    """The contents of a source."""

    cases: list[Case] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def __iadd__(self, other: Collected) -> Collected:
        self.cases += other.cases
        self.figures += other.figures
        self.left_out += other.left_out
        return self


def parts(groups: Iterable[Group]) -> dict[Group, Part]:
    """Return the part that each group belongs to.

    The groups of a setup alternate between the part on which parameters may be fitted and the part that is only
    reported. They are ordered by source, workload and load (numbers by value); those without a stated load come last,
    because little can be fitted on them. Each setup thus has something to be fitted on; a setup with a single group has
    nothing to report.
    """
    part_of: dict[Group, Part] = {}
    for _, of_setup in groupby(sorted(set(groups), key=_order), key=lambda group: group.setup):
        for index, group in enumerate(of_setup):
            part_of[group] = "report" if index % 2 else "fit"
    return part_of


def _order(group: Group) -> tuple[str, str, bool, str, float, str]:
    digits = "".join(character for character in group.load if character.isdigit() or character == ".")
    size = float(digits) if digits else float("inf")
    return (group.setup, group.source, not digits, group.workload, size, group.load)


def geometric_survival(accepted: float, k: int) -> tuple[float, ...]:
    """Return the survival a, a^2, ..., a^k that sums to `accepted`; the rate a is found by bisection.

    Raises
    ------
    ValueError
        If `accepted` is negative or greater than `k`.
    """
    if not 0 <= accepted <= k:
        raise ValueError(f"{accepted:.3f} accepted of {k} drafted")
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**j for j in range(1, k + 1)) < accepted else (low, rate)
    return tuple(low**j for j in range(1, k + 1))
