"""Rule: a schedule of k by batch size, where a replica's batches are now small and now large."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from backends.calibration.batch_schedule import SCHEDULE_KEY, SCHEDULED, Range, decode_step_s, ranges_of
from backends.calibration.calibration import load_calibration
from backends.calibration.parameters import EngineParameters
from backends.occupancy import PROBES
from backends.speculation import Method
from gateway.advice.draft_length import COST_SPREAD, DRAWS, MIN_DRAFTS, reach
from gateway.advice.evidence import BackendEvidence, ModelEvidence
from gateway.advice.finding import MIN_ANSWERS, Finding, Gain, flag_value, gain_of, lines
from gateway.advice.relative_time import OF, Floats

_MIN_MINUTES: Final = 10
_MOST_MINUTES: Final = 200
_ROUNDS: Final = 40
_GRID: Final = 4
"""Steps are computed for every quarter of a request, since means over a minute are no whole numbers."""


def schedule(model: ModelEvidence) -> list[Finding]:
    """Return the backends on which k should depend on the batch size."""
    return [finding for backend in model.backends if (finding := _of_backend(model.name, backend)) is not None]


def _of_backend(model: str, backend: BackendEvidence) -> Finding | None:
    positions, config = backend.positions, backend.speculative_config
    if positions is None or backend.steps is None or not backend.calibration or backend.is_silent:
        return None
    if backend.method not in SCHEDULED or SCHEDULE_KEY in config:
        return None
    if backend.answers < MIN_ANSWERS or positions.drafts < MIN_DRAFTS or len(backend.minutes) < _MIN_MINUTES:
        return None
    batches = np.array([minute.running for minute in backend.minutes]) / PROBES
    batches = batches[batches > 0]
    if len(batches) > _MOST_MINUTES:
        batches = np.quantile(batches, (np.arange(_MOST_MINUTES) + 0.5) / _MOST_MINUTES)
    calibration = load_calibration(backend.calibration)
    if not len(batches) or backend.steps.load[1] <= 0 or backend.method not in calibration.methods:
        return None
    longest = int(flag_value(backend.flags, "--max-num-seqs") or calibration.scheduler.max_num_seqs)
    parameters = EngineParameters.of(calibration, backend.method, {**config, "num_speculative_tokens": backend.k})
    context_tokens = 1e3 * backend.steps.load[2] / backend.steps.load[1]
    drawn = reach(positions, backend.k, backend.answers, np.random.default_rng(0))[:, : backend.k]
    tokens = 1.0 + np.cumsum(np.concatenate([np.zeros((DRAWS, 1)), drawn], axis=1), axis=1)  # shape (draws, k + 1)
    grid = np.arange(_GRID, _GRID * longest + 1) / _GRID
    step_s = np.stack([decode_step_s(parameters, grid, k, context_tokens) for k in range(backend.k + 1)], axis=1)
    ranges = ranges_of(grid[::_GRID, None] * tokens.mean(axis=0) / step_s[::_GRID])
    most = max(k for _, _, k in ranges)
    if len(ranges) == 1 or not most:
        return None
    gain = _gain(batches, step_s, tokens, ranges, backend.k)
    if not gain.is_worth_it:
        return None
    smaller = next(first for first, _, k in ranges if k < backend.k)
    share = float(batches[batches >= smaller].sum() / batches.sum())
    return Finding(
        "schedule",
        model,
        backend.name,
        f"k = {backend.k} at every batch size: a smaller one is faster from {smaller} requests on",
        gain,
        f"{share:.0%} of the requests' time at such batch sizes, in {len(backend.minutes)} minutes with "
        f"{batches.min():.0f} to {batches.max():.0f}; {positions.drafts:,} drafts; {_fixed(batches, step_s, tokens)}",
        lines(
            model,
            backend.name,
            "speculative_config:",
            # That of an MTP head must stay a multiple of its layers.
            f"  num_speculative_tokens: {backend.k if backend.method is Method.MTP else most} # {backend.k}",
            f"  {SCHEDULE_KEY}: {[list(one) for one in ranges]}",
        ),
    )


def _fixed(batches: Floats, step_s: Floats, tokens: Floats) -> str:
    """Return what the best k gains that is the same for all batch sizes."""
    longest, present = len(step_s) // _GRID + 1, step_s.shape[1] - 1
    gains = {k: _gain(batches, step_s, tokens, [(1, longest, k)], present) for k in range(1, present + 1)}
    best = max(gains, key=lambda k: gains[k].share)
    return f"one k for all: k = {best} would save {gains[best].share:.0%}"


def _gain(batches: Floats, step_s: Floats, tokens: Floats, ranges: list[Range], present: int) -> Gain:
    """Return the gain of a schedule over the batch sizes of some minutes.

    Faster answers also mean fewer requests in the batch (Little's law), which is solved for.
    """
    by_batch = np.concatenate([np.full(_GRID * (last - first + 1), k) for first, last, k in ranges])[: len(step_s)]
    error = np.random.default_rng(1).normal(1.0, COST_SPREAD, (len(tokens), 1))
    draws = np.arange(len(tokens))[:, None]

    def seconds_per_token(at: Floats, ks: npt.NDArray[np.int64] | None) -> Floats:
        cell = np.clip(np.rint(_GRID * at).astype(np.int64) - _GRID, 0, len(step_s) - 1)
        fixed_s = step_s[cell, present]
        if ks is None:
            return np.asarray(fixed_s / tokens[draws, present])
        k = ks[cell]
        changed_s = fixed_s * (1.0 + error * (step_s[cell, k] / fixed_s - 1.0))
        return np.asarray(changed_s / tokens[draws, k])

    at = np.broadcast_to(batches, (len(tokens), len(batches)))
    now = seconds_per_token(at, None)
    ratio = np.ones_like(now)
    for _ in range(_ROUNDS):
        ratio = 0.5 * (ratio + seconds_per_token(at * ratio, by_batch) / now)
    return gain_of(1.0 - (ratio * batches).sum(axis=1) / batches.sum(), OF)
