"""Fit of the simulator's parameters to the measurements at concurrency 2 and 8, and to single prefills."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.calibration.calibration import Acceptance, Calibration, Drafting
from backends.draft_schedule import draft_tokens
from backends.speculation import Method
from benchmarks.vllm_cpu.engines import speculative_config
from benchmarks.vllm_cpu.measure import Cell
from benchmarks.vllm_cpu.simulate import is_prefill, measured, reported, scripts, simulated

FITTED = (2, 8)
Floats = npt.NDArray[np.float64]
_SPREADS = np.arange(0.0, 1.25, 0.05)
_ROUNDS = 6


def fit(cells: Sequence[Cell], start: Calibration) -> Calibration:
    """Return `start` with its step time, drafting costs and acceptance fitted.

    The slopes over prompt and context tokens are least-squares fits through medians. Every other pair of parameters is
    chosen so that the median TPOT of the fitted closed loops is as measured.
    """
    acceptances = {
        method: _acceptance([cell for cell in cells if cell.method is method and cell.concurrency in FITTED])
        for method in (Method.EAGLE, Method.DRAFT_MODEL)
    }
    start = _with_acceptance(start, acceptances)
    fitted = fit_step(cells, start)
    for method in (Method.NGRAM, Method.SUFFIX, Method.DRAFT_MODEL, Method.EAGLE):
        fitted = _with_drafting(fitted, method, _solve(_drafting_of(fitted, method), cells, method))
    return fitted


def fit_step(cells: Sequence[Cell], start: Calibration) -> Calibration:
    """Return `start` with the step time fitted to the baseline's cells."""
    above_s, context_s = _prefill([cell for cell in cells if cell.method is Method.BASELINE and is_prefill(cell)])

    def with_step(values: Floats) -> Calibration:
        step = {
            "base_s": values[0],
            "per_token_below_knee_s": values[1],
            "per_token_above_knee_s": above_s,
            "per_context_token_s": context_s,
        }
        return start.model_copy(update={"step": start.step.model_copy(update=step)})

    return with_step(_solve(with_step, cells, Method.BASELINE))


def _drafting_of(calibration: Calibration, method: Method) -> Callable[[Floats], Calibration]:
    return lambda values: _with_drafting(calibration, method, values)


def _with_drafting(calibration: Calibration, method: Method, values: Floats) -> Calibration:
    """Set the drafting cost per step and per request; a draft model's cost is per pass, that of the others per step."""
    entry = calibration.methods[method]
    passes = draft_tokens(method, speculative_config(method))
    fixed = {"per_pass_s": values[0] / passes} if entry.acceptance else {"base_s": values[0]}
    drafting = Drafting(source=entry.drafting.source, **fixed, per_request_s=values[1] / passes)
    methods = {**calibration.methods, method: entry.model_copy(update={"drafting": drafting})}
    return calibration.model_copy(update={"methods": methods})


def _solve(calibrated: Callable[[Floats], Calibration], cells: Sequence[Cell], method: Method) -> Floats:
    """Return two non-negative parameters (s, s per request) for which the TPOT of the fitted cells is as measured."""
    loops = reported(scripts(cells, method, calibrated(np.zeros(2))))
    loops = [(cell, requests) for cell, requests in loops if cell.concurrency in FITTED]
    target = _by_concurrency({id(cell): measured(cell).tpot_ms for cell, _ in loops}, loops)

    def tpot(values: Floats) -> Floats:
        calibration = calibrated(values)
        tpot_ms = {id(cell): simulated(calibration, cell, requests).tpot_ms for cell, requests in loops}
        return _by_concurrency(tpot_ms, loops)

    values = np.array([1e-3, 1e-4])
    for _ in range(_ROUNDS):
        here = tpot(values)
        changes = np.diag(np.maximum(1e-5, 0.05 * values))
        slopes = np.stack([(tpot(values + change) - here) / change.sum() for change in changes], axis=1)
        weight = 1 / target  # relative errors
        both = values + np.linalg.solve(slopes, target - here)
        if (both >= 0).all():
            values = both
            continue
        kept = int(np.argmax(both))  # the other one is 0
        held = np.where(np.arange(2) == kept, values, 0.0)
        line, rest = slopes[:, kept] * weight, (target - tpot(held)) * weight
        values = np.where(np.arange(2) == kept, np.maximum(0.0, held + line @ rest / (line @ line)), 0.0)
    return values


def _by_concurrency(of_cell: Mapping[int, float], loops: Sequence[tuple[Cell, Any]]) -> Floats:
    return np.array(
        [
            np.median([of_cell[id(cell)] for cell, _ in loops if cell.concurrency == concurrency])
            for concurrency in FITTED
        ]
    )


def _prefill(cells: Sequence[Cell]) -> tuple[float, float]:
    """Return the seconds per prompt token, and per context token of a step that decodes one token."""
    prompts, first, steps = [], [], []
    for cell in cells:
        prompts.append(np.median([len(answer.prompt_ids) for answer in cell.answers]))
        first.append(np.median([answer.chunks_s[0] - answer.sent_s for answer in cell.answers]))
        steps.append(np.median(np.concatenate([np.diff(answer.chunks_s) for answer in cell.answers])))
    return max(0.0, float(np.polyfit(prompts, first, 1)[0])), max(0.0, float(np.polyfit(prompts, steps, 1)[0]))


def _acceptance(cells: Sequence[Cell]) -> Acceptance:
    """Return the acceptance at each position given acceptance before it, and its spread over requests.

    The spread is chosen so that accepted tokens per step vary as much over drawn requests as over the measured ones.
    """
    answers = [answer for cell in cells if cell.turn >= 0 for answer in cell.answers if answer.draft_steps]
    steps = np.array([answer.draft_steps for answer in answers])
    accepted_at = np.array([answer.accepted_at for answer in answers])
    reached = np.concatenate([[steps.sum()], accepted_at.sum(axis=0)])
    rates = reached[1:] / reached[:-1]
    target = float(np.std(accepted_at.sum(axis=1) / steps))
    rng = np.random.default_rng(0)
    spread = min(_SPREADS, key=lambda spread: abs(_drawn_deviation(rng, rates, steps, spread) - target))
    return Acceptance(
        by_position=tuple(round(float(rate), 4) for rate in rates),
        request_spread=round(float(spread), 2),
        source="fitted",
    )


def _drawn_deviation(rng: np.random.Generator, rates: Floats, steps: npt.NDArray[np.int64], spread: float) -> float:
    shift = np.exp(spread * rng.standard_normal((8, len(steps), 1)))
    odds = rates / (1 - rates) * shift
    reach = np.cumprod(odds / (1 + odds), axis=2)
    # Accepted tokens of a step, 0 to k: mean and variance from the probability of reaching each position.
    k = np.arange(1, len(rates) + 1)
    mean = reach.sum(axis=2)
    variance = (reach * (2 * k - 1)).sum(axis=2) - mean**2
    return float(np.std(mean + rng.standard_normal(mean.shape) * np.sqrt(variance / steps)))


def _with_acceptance(calibration: Calibration, fitted: Mapping[Method, Acceptance]) -> Calibration:
    methods = dict(calibration.methods)
    for method, acceptance in fitted.items():
        methods[method] = methods[method].model_copy(
            update={"acceptance": dict.fromkeys(methods[method].acceptance, acceptance)}
        )
    return calibration.model_copy(update={"methods": methods})
