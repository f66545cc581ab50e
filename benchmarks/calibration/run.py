"""Simulation of all cases, and comparison with the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from backends.calibration.calibration import Calibration
from backends.speculation import Method
from benchmarks.calibration.arithmetic import Row, rows_of
from benchmarks.calibration.cases import Case, parts
from benchmarks.calibration.fit import Name, fit
from benchmarks.calibration.play import Played, play
from benchmarks.calibration.scripts import can_be_played, scripts
from benchmarks.calibration.setups import setup
from benchmarks.calibration.texts import Texts

_STEP: list[Name] = [(None, "base_s"), (None, "per_token_above_knee_s")]
_LAB012: list[Name] = [
    *_STEP,
    (None, "speculation_overhead_s"),
    (Method.NGRAM, "base_s"),
    (Method.SUFFIX, "base_s"),
    (Method.EAGLE3, "base_s"),
]
_LAB019: list[Name] = [(None, "base_s"), (None, "speculation_overhead_s")]
_GUIDE012: list[Name] = [
    (None, "base_s"),
    (Method.NGRAM, "base_s"),
    (Method.SUFFIX, "base_s"),
    (Method.EAGLE, "per_pass_s"),
    (Method.EAGLE3, "per_pass_s"),
]

_SWEEP: list[Name] = [
    *_STEP,
    (None, "per_token_below_knee_s"),
    (None, "per_request_s"),
    (Method.DSPARK, "base_s"),
]

FREE: dict[str, list[Name]] = {
    "llama-3.1-8b-gh200": [
        *_STEP,
        (None, "per_token_below_knee_s"),
        (None, "per_context_token_s"),
        (None, "speculation_overhead_s"),
        (Method.EAGLE, "per_pass_s"),
        (Method.EAGLE, "per_request_s"),
        (Method.DSPARK, "base_s"),
        (Method.DSPARK, "per_pass_s"),
        (Method.DSPARK, "per_request_s"),
    ],
    "apertus-70b-4xgh200": [
        *_STEP,
        (None, "speculation_overhead_s"),
        (Method.DRAFT_MODEL, "per_pass_s"),
    ],
    "llama-3.1-8b-lab012": _LAB012,
    "llama-3.1-70b-lab012": _LAB012,
    "qwen3-32b": _LAB012,
    "qwen3-30b-a3b": [*_LAB012, (None, "per_token_below_knee_s")],
    "llama-3.1-8b-l40s": _GUIDE012,
    "llama-3.3-70b-2xh200-guide012": _GUIDE012,
    "llama-3.1-8b-h200-lab019": [*_LAB019, (Method.EAGLE, "per_pass_s")],
    "llama-3.1-8b-h100-lab019": [*_LAB019, (Method.EAGLE, "per_pass_s"), (Method.DRAFT_MODEL, "per_pass_s")],
    "llama-3.1-70b-4xh100": [*_LAB019, (Method.DRAFT_MODEL, "per_pass_s")],
    "deepseek-v4-flash-mi350x": [*_SWEEP, (None, "no_graph_s"), (Method.DSPARK, "adaptive_s")],
    "deepseek-v4-pro-8xb300": [*_SWEEP, (None, "no_graph_s")],
    "kimi-k3-8xmi355x": _SWEEP,
}
"""Parameters of each setup that may be fitted."""

SGLANG: list[Name] = [(None, "base_s"), (Method.EAGLE3, "base_s"), (Method.EAGLE3, "per_pass_s")]


@dataclass(frozen=True, slots=True)
class Report:
    """All rows, with the run's own acceptance where it was measured, and blind to it.

    Parameters
    ----------
    left_out
        Rows of adaptive verification, with step times fitted to the other runs of its setup.
    """

    rows: list[Row]
    blind: list[Row]
    left_out: list[Row]


def compare(cases: Sequence[Case], texts: Texts) -> Report:
    """Simulate every possible case twice: with its own acceptance and blind to it."""
    part = parts(case.group for case in cases)
    ordered = sorted(cases, key=lambda case: (case.group, not case.is_baseline))
    report = Report([], [], without_adaptive(cases, texts))
    for group, members in groupby(ordered, key=lambda case: case.group):
        cases_of_group = list(members)
        informed = {id(case): _figures(case, texts, blind=False) for case in cases_of_group}
        unaware = {
            id(case): informed[id(case)] if case.given is None else _figures(case, texts, blind=True)
            for case in cases_of_group
        }
        report.rows.extend(rows_of(cases_of_group, informed, part[group]))
        report.blind.extend(rows_of(cases_of_group, unaware, part[group]))
    return report


def without_adaptive(cases: Sequence[Case], texts: Texts) -> list[Row]:
    """Return the rows of adaptive verification, with the calibration of its setup fitted anew to all its other runs.

    No run with adaptive verification has a part in it: its overhead, which is fitted to such runs, is left out.
    """
    found = []
    for name in sorted({case.group.setup for case in cases if case.is_adaptive}):
        of_setup = [case for case in cases if case.group.setup == name]
        free = [parameter for parameter in FREE[name] if parameter[1] != "adaptive_s"]
        calibration = without_overhead(setup(name))
        others = [case for case in of_setup if not case.is_adaptive]
        calibration = fit(calibration, others, free, lambda case, changed: played(case, changed, texts), rounds=1)
        for case in of_setup:
            if case.is_adaptive:
                figures = {id(case): played(case, calibration, texts).figures}
                found += rows_of([case], figures, "report")
    return found


def without_overhead(calibration: Calibration) -> Calibration:
    """Return the calibration without the time that adaptive verification adds to a step."""
    methods = {
        method: entry.model_copy(update={"drafting": entry.drafting.model_copy(update={"adaptive_s": 0.0})})
        for method, entry in calibration.methods.items()
    }
    return calibration.model_copy(update={"methods": methods})


def _figures(case: Case, texts: Texts, *, blind: bool) -> dict[str, float] | None:
    calibration = setup(case.group.setup)
    if not can_be_played(case, calibration, blind=blind):
        return None
    return played(case, calibration, texts, blind=blind).figures


def played(case: Case, calibration: Calibration, texts: Texts, *, blind: bool = False) -> Played:
    """Return the result of one case."""
    return play(case, calibration, scripts(case, calibration, texts, blind=blind))


def fitted(name: str, cases: Sequence[Case], texts: Texts) -> tuple[Calibration, list[Name]]:
    """Return a setup fitted to its fitting part, and the parameters that were fitted.

    Raises
    ------
    ValueError
        If the setup has no parameters to fit.
    """
    free = SGLANG if name.startswith("sglang/") else FREE.get(name)
    if free is None:
        raise ValueError(f"{name!r} has no parameters to fit; the setups that do: {', '.join(FREE)} and sglang/MODEL")
    part = parts(case.group for case in cases)
    chosen = [case for case in cases if case.group.setup == name and part[case.group] == "fit"]
    calibration = setup(name)
    chosen = [case for case in chosen if can_be_played(case, calibration, blind=False)]
    return fit(calibration, chosen, free, lambda case, changed: played(case, changed, texts)), free
