"""Errors of simulated figures, by row and in total."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from benchmarks.calibration.cases import Case, Group, Part

BASELINE = "baseline"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity of one run, and its simulated value.

    Parameters
    ----------
    label
        Method, with k.
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
    """Accuracy of the simulated speedups over the baseline.

    Parameters
    ----------
    rows, median_error, within_20
        Number of speedups; median of their absolute errors; share within 20%.
    groups
        Number of groups in which at least two runs (including the baseline) were compared.
    winners, nearly, methods
        Number of groups in which the run that is fastest in the simulation is the fastest as measured; is as fast
        within `tie`; has the same method as the fastest, with any k.
    """

    rows: int
    median_error: float
    within_20: float
    groups: int
    winners: int
    nearly: int
    methods: int


def rows_of(cases: Sequence[Case], simulated: Mapping[int, dict[str, float] | None], part: Part) -> list[Row]:
    """Return the rows of one group: the measured quantities of each case, and its speedup over the baseline.

    Parameters
    ----------
    cases
        Cases of one group, including the baseline if the source has one.
    simulated
        Simulated quantities by the case's `id`; None if the case cannot be played.

    Raises
    ------
    ValueError
        If the cases are of several groups, or more than one is a baseline.
    """
    group = cases[0].group
    baselines = [case for case in cases if case.is_baseline]
    if any(case.group != group for case in cases) or len(baselines) > 1:
        raise ValueError(f"{group}: expected one group with at most one baseline")
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
        Relative difference of measured speedups that counts as a tie. Ratios between runs of different sweeps are
        accurate to about 5%, according to the source that repeated its runs (Apertus).
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
        winners=sum(each.lost == 0 for each in choices),
        nearly=sum(each.lost <= tie for each in choices),
        methods=sum(method_of(each.chosen) == method_of(each.best) for each in choices),
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """The run chosen by the simulation, the best run, and the share of its speed that the choice loses."""

    chosen: str
    best: str
    lost: float


def choice(speedups: Sequence[Row]) -> Choice:
    """Return the choice according to the simulated speedups of a group; the baseline can be chosen too."""
    measured = {row.label: row.measured for row in speedups} | {BASELINE: 1.0}
    simulated = {row.label: row.simulated for row in speedups} | {BASELINE: 1.0}
    chosen = max(simulated, key=lambda label: simulated[label])
    best = max(measured, key=lambda label: measured[label])
    return Choice(chosen, best, 1 - measured[chosen] / measured[best])


def method_of(label: str) -> str:
    """Return the method in a run's label."""
    return label.partition(" ")[0]
