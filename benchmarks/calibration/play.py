"""Simulation of a case in virtual time: the quantities that were measured, and the components of its time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.calibration.calibration import Calibration
from backends.calibration.parameters import EngineParameters
from backends.drafting.script import Script
from backends.simulator.engine.fleet import Fleet, Replica, Step
from backends.simulator.engine.virtual_time import Timeline, run_closed_loop, run_virtual
from benchmarks.calibration.cases import Case, Closed

Floats = npt.NDArray[np.float64]

FEATURES = (
    *("base", "below", "above", "request", "context", "no_graph", "speculation"),
    *("draft_base", "draft_pass", "draft_request", "adaptive"),
)
"""Coefficients of the parameters of a step's time; see `features`."""


@dataclass(frozen=True, slots=True)
class Played:
    """The result of a simulated case.

    Parameters
    ----------
    figures
        Values by quantity: `output_tok_s` over the whole run, `tok_s_per_request` while decoding, `ttft_median_ms`,
        `itl_median_ms` (between a request's chunks), `tpot_mean_ms`, `step_ms` (mean time between chunks),
        `tokens_per_step`; `emitted_at_positions`, the mean over requests of the tokens emitted by a step starting at
        each output position (not only at those where a step does start, so that a long copy counts many times).
    features
        Totals of `FEATURES` over the run, shape (11,).
    decode_features
        The same, with each step counted once per request that gets a later chunk from it, shape (11,).
    busy_s, decode_s
        The corresponding seconds.
    """

    figures: dict[str, float]
    features: Floats
    decode_features: Floats
    busy_s: float
    decode_s: float


def play(case: Case, calibration: Calibration, requests: list[Script]) -> Played:
    """Return the result of a case with the step times of a calibration."""
    parameters = EngineParameters.of(calibration, case.method, dict(case.config), **case.limits)
    fleet = Fleet([Replica("a", calibration, case.method, case.config, parameters=parameters)])
    steps: list[Step] = []
    if isinstance(case.load, Closed):
        timeline = run_closed_loop(fleet, requests, case.load.concurrency, steps.append)
    else:
        gaps = np.random.default_rng(3).exponential(1 / case.load.rate_per_s, len(requests))
        timeline = run_virtual(fleet, zip(np.cumsum(gaps).tolist(), requests, strict=True), steps.append)
    each = np.array([features(step, parameters) for step in steps])
    later = np.array([sum(emission.sent > emission.tokens for emission in step.emissions) for step in steps])
    durations = np.array([step.duration_s for step in steps])
    return Played(
        figures=_figures(timeline, durations, later)
        | {"emitted_at_positions": float(np.mean([request.emitted[1:].mean() for request in requests]))},
        features=each.sum(axis=0),
        decode_features=later @ each,
        busy_s=float(durations.sum()),
        decode_s=float(later @ durations),
    )


def features(step: Step, parameters: EngineParameters) -> list[float]:
    """Return the coefficients of the parameters of `StepTime` and `Drafting` in a step, in the order of `FEATURES`.

    Parameters that are not fitted are left out: the overhead (part of `base`), `verify_share`, the draft's context.
    """
    below = min(step.batch_tokens, parameters.step.knee_tokens)
    drafts = float(parameters.k > 0 and any(emission.drafted for emission in step.emissions))
    drafted = max(step.k, parameters.least_passes)
    emitting = len(step.emissions) if drafted else 0
    passes = (1 if parameters.drafting.parallel else drafted) * (emitting > 0)
    return [
        1.0,
        below,
        step.batch_tokens - below,
        len(step.emissions),
        step.context_tokens,
        float(0 < parameters.step.graph_tokens < step.batch_tokens),
        max(drafts, float(emitting > 0)),
        float(emitting > 0),
        passes,
        passes * emitting,
        float(parameters.adaptive and any(emission.drafted for emission in step.emissions)),
    ]


def _figures(timeline: Timeline, durations: Floats, later: npt.NDArray[np.int64]) -> dict[str, float]:
    decode_s = timeline.e2e_s - timeline.ttft_s
    tokens = timeline.output_tokens - 1
    gaps = np.repeat(durations, later)
    return {
        "output_tok_s": timeline.tokens_per_s,
        "tok_s_per_request": float(tokens.sum() / decode_s.sum()),
        "ttft_median_ms": float(np.median(timeline.ttft_s)) * 1e3,
        "itl_median_ms": float(np.median(gaps)) * 1e3,
        "tpot_mean_ms": float(np.nanmean(timeline.tpot_s)) * 1e3,
        "tpot_median_ms": float(np.nanmedian(timeline.tpot_s)) * 1e3,
        "step_ms": float(decode_s.sum() / later.sum()) * 1e3,
        "tokens_per_step": float(tokens.sum() / later.sum()),
    }
