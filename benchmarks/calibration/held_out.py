"""What is predicted of figures that nothing was fitted on: tokens per second, and where speculation stops paying."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median

from benchmarks.calibration.arithmetic import Row
from benchmarks.calibration.cases import Group

AIMS = (0.10, 1.5)
"""Aims: median absolute error of tokens per second, and factor between the crossing points."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """The concurrency from which on a method is slower than none, measured and simulated.

    Parameters
    ----------
    last
        The highest concurrency that was measured.
    measured, simulated
        None if the method pays throughout.
    """

    group: Group
    label: str
    last: float
    measured: float | None
    simulated: float | None

    @property
    def factor(self) -> float:
        """Factor between the two; one beyond the highest concurrency measured counts as there."""
        ratio = (self.simulated or self.last) / (self.measured or self.last)
        return max(ratio, 1 / ratio)


def crossings(rows: Iterable[Row]) -> list[Crossing]:
    """Return the crossing point of every method measured at three concurrencies or more, on one workload.

    Methods that pay throughout both as measured and as simulated, or never, have none and are left out.
    """
    speedups = [row for row in rows if row.quantity == "speedup" and row.group.load.isdigit()]
    found = []
    for _, members in groupby(sorted(speedups, key=_curve), key=lambda row: _curve(row)[:4]):
        curve = list(members)
        if len(curve) < 3:
            continue
        loads = [float(row.group.load) for row in curve]
        measured = crossing_point(loads, [row.measured for row in curve])
        simulated = crossing_point(loads, [row.simulated for row in curve])
        if measured != simulated:
            found.append(Crossing(curve[0].group, curve[0].label, loads[-1], measured, simulated))
    return found


def _curve(row: Row) -> tuple[str, str, str, str, float]:
    return (row.group.setup, row.group.source, row.group.workload, row.label, float(row.group.load))


def crossing_point(loads: Sequence[float], speedups: Sequence[float]) -> float | None:
    """Return the load at which the speedup falls below 1 for good, interpolated in the logarithms; None if it does not.

    Examples
    --------
    >>> crossing_point([8, 32], [1.25, 0.8])
    16.0
    >>> crossing_point([8, 32], [1.2, 1.1])
    """
    if speedups[-1] >= 1:
        return None
    for (low, above), (high, below) in reversed(list(pairwise(zip(loads, speedups, strict=True)))):
        if above >= 1:
            share = math.log(above) / (math.log(above) - math.log(below))
            return float(round(low * (high / low) ** share, 9))
    return loads[0]


def tables(reported: Sequence[Row], all_rows: Sequence[Row], left_out: Sequence[Row]) -> str:
    """Return the two tables.

    Parameters
    ----------
    reported
        Rows of the reported part, by calibrations fitted on the other.
    all_rows
        Rows of both parts, for the crossing points.
    left_out
        Rows of adaptive verification, by calibrations fitted without it.
    """
    return _throughput(reported, left_out) + "\n\n" + _crossings(crossings(all_rows))


def _throughput(reported: Sequence[Row], left_out: Sequence[Row]) -> str:
    lines = [
        "| tokens/s of | fitted on | figures | median abs. error | largest |",
        "|---|---|---|---|---|",
        f"| *aim* | | | <= {AIMS[0]:.0%} | |",
    ]
    for fitted_on, rows in (("the fitting part", reported), ("no speculation and fixed k", left_out)):
        figures = [row for row in rows if row.quantity == "output_tok_s"]
        for source in (*sorted({row.group.source for row in figures}), "all"):
            errors = [abs(row.error) for row in figures if source in ("all", row.group.source)]
            if errors:
                lines.append(f"| {source} | {fitted_on} | {len(errors)} | {median(errors):.1%} | {max(errors):.0%} |")
    return "\n".join(lines)


def _crossings(found: Sequence[Crossing]) -> str:
    lines = [
        "| crossing point | curves | median factor | within 1.5 | largest |",
        "|---|---|---|---|---|",
        f"| *aim* | | <= {AIMS[1]} | | |",
    ]
    for source in (*sorted({each.group.source for each in found}), "all") if found else ():
        factors = [each.factor for each in found if source in ("all", each.group.source)]
        within = sum(factor <= AIMS[1] for factor in factors)
        lines.append(
            f"| {source} | {len(factors)} | {median(factors):.2f} | {within} of {len(factors)} | {max(factors):.2f} |"
        )
    return "\n".join(lines)
