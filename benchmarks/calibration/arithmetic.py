"""Errors of simulated figures, by row and over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from benchmarks.calibration.cases import Case, Group, Part

BASELINE = "baseline"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity of one run beside the simulated one.

    Parameters
    ----------
    label
        The method, with k.
    given
        Whether acceptance was taken from the run itself.
    """

    part: Part
    group: Group
    label: str
    quantity: str
    measured: float
    simulated: float
    given: bool

    @property
    def error(self) -> float:
        """Relative error of the simulated figure."""
        return self.simulated / self.measured - 1


@dataclass(frozen=True, slots=True)
class Summary:
    """How well speedups over the baseline are met.

    Parameters
    ----------
    rows, median_error, within_20
        Speedups; the median of their absolute errors; the share within 20%.
    groups
        Those in which two or more runs (the baseline is one) were compared.
    winners, nearly, methods
        Of them, those in which the run simulated to be fastest is the fastest one; is as fast within `tie`; is of the
        same method, whatever its k.
    """

    rows: int
    median_error: float
    within_20: float
    groups: int
    winners: int
    nearly: int
    methods: int


def rows_of(cases: Sequence[Case], simulated: Mapping[int, dict[str, float] | None], part: Part) -> list[Row]:
    """Return the rows of one group: what was measured of each case, and its speedup over the baseline.

    Parameters
    ----------
    cases
        Of one group, the baseline among them where the source has one.
    simulated
        Quantities as simulated by the case's `id`, None where it cannot be played.

    Raises
    ------
    ValueError
        If the cases are not of one group, or more than one is its baseline.
    """
    group = cases[0].group
    baselines = [case for case in cases if case.is_baseline]
    if any(case.group != group for case in cases) or len(baselines) > 1:
        raise ValueError(f"{group}: one group with one baseline is wanted")
    rows: list[Row] = []
    plain = simulated[id(baselines[0])] if baselines else None
    for case in cases:
        figures = simulated[id(case)]
        if figures is None:
            continue
        given = case.given is not None
        speedup: float | None = None
        if plain is not None and not case.is_baseline:
            speedup = _ratio(figures[case.speed], plain[case.speed], inverse=case.inverse)
        for quantity, value in case.measured.items():
            if quantity in figures:
                rows.append(Row(part, group, case.label, quantity, value, figures[quantity], given))
            elif quantity == "speedup" and speedup is not None:
                rows.append(Row(part, group, case.label, "speedup", value, speedup, given))
        if speedup is not None and "speedup" not in case.measured and case.speed in baselines[0].measured:
            measured = _ratio(case.measured[case.speed], baselines[0].measured[case.speed], inverse=case.inverse)
            rows.append(Row(part, group, case.label, "speedup", measured, speedup, given))
    return rows


def _ratio(figure: float, of_baseline: float, *, inverse: bool) -> float:
    return of_baseline / figure if inverse else figure / of_baseline


def summarize(rows: Iterable[Row], tie: float = 0.05) -> Summary:
    """Summarize the speedups among `rows`.

    Parameters
    ----------
    tie
        Relative difference of measured speedups that says nothing: ratios between runs of different sweeps are good
        to about 5%, say those who repeated theirs (Apertus).
    """
    speedups = sorted((row for row in rows if row.quantity == "speedup"), key=lambda row: row.group)
    errors = [abs(row.error) for row in speedups]
    groups = [list(members) for _, members in groupby(speedups, key=lambda row: row.group)]
    choices = [choice(members) for members in groups]
    return Summary(
        rows=len(errors),
        median_error=median(errors) if errors else float("nan"),
        within_20=sum(error <= 0.2 for error in errors) / len(errors) if errors else float("nan"),
        groups=len(groups),
        winners=sum(made.lost == 0 for made in choices),
        nearly=sum(made.lost <= tie for made in choices),
        methods=sum(method_of(made.chosen) == method_of(made.best) for made in choices),
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """What the simulation would make one choose, the best there was, and the share of its speed that this loses."""

    chosen: str
    best: str
    lost: float


def choice(speedups: Sequence[Row]) -> Choice:
    """Return what the simulated speedups of a group would make one choose; the baseline is a choice too."""
    measured = {row.label: row.measured for row in speedups} | {BASELINE: 1.0}
    simulated = {row.label: row.simulated for row in speedups} | {BASELINE: 1.0}
    chosen = max(simulated, key=lambda label: simulated[label])
    best = max(measured, key=lambda label: measured[label])
    return Choice(chosen, best, 1 - measured[chosen] / measured[best])


def method_of(label: str) -> str:
    """Return the method that a run's label names."""
    return label.partition(" ")[0]
