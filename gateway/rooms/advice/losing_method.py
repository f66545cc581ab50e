"""Rule: a method that is slower than no speculation on nearly all traffic.

It does not compare two drafting methods: which one a pool needs depends on all of its replicas, so only a simulation of
the whole pool can tell (`gateway plan`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from backends.speculation import Method
from gateway.rooms.advice.evidence import BackendEvidence, ModelEvidence, Steps
from gateway.rooms.advice.finding import OF, Finding, Floats, Gain, gain_of, lines, relative_time
from policies.learned.belief import SPREAD

NEARLY_ALL: Final = 0.9
"""Share of the output tokens on which a method must lose."""
DRAWS: Final = 400
_MIN_ANSWERS: Final = 5.0
"""A learning policy soon sends a losing replica few requests; the gain's interval covers the resulting uncertainty."""
_NOISE: Final = 0.15
"""Relative standard deviation of an answer's mean step time around the fit."""
_MODEL: Final = 0.05
"""Relative standard deviation of the step time at the load of another backend."""
_UNKNOWN: Final = 0.1
"""Relative standard deviation of a step time not measured at this load, or taken from a calibration."""


@dataclass(frozen=True, slots=True)
class Savings:
    """What speculation saves in a pool, compared with a baseline at each backend for the same requests."""

    gain: Gain | None = None  # None while unknown
    baseline: str = ""  # name of the measured baseline; empty for a calibration's
    missing: str = ""  # what is missing for the comparison, or for advice if speculation loses


def losing_method(model: ModelEvidence) -> list[Finding]:
    """Return the speculating backends that lose on nearly all traffic."""
    return [each for _, each in _judged(model) if isinstance(each, Finding)]


def of_speculation(model: ModelEvidence) -> Savings:
    """Compare a pool with the same pool without speculation.

    The errors of all backends are assumed to have the same sign, as those of a shared baseline do.
    """
    baseline, present_s, without_s = measured_baseline(model), 0.0, np.zeros(3)
    if missing := _no_baseline(model):
        return Savings(missing=missing)
    speculating = [each for each in model.backends if each.method is not Method.BASELINE]
    if max(map(_measured, speculating), default=0.0) < _MIN_ANSWERS:
        few = ", ".join(f"{each.name} has {_measured(each):.0f}" for each in speculating) or "no replica speculates"
        return Savings(missing=f"of a replica with speculation {_MIN_ANSWERS:.0f} measured answers are needed: {few}")
    for backend in model.backends:
        if backend.steps is None or backend.is_silent or backend.contradiction is not None:
            continue
        kinds = tuple(replace(each, tokens=each.tokens * each.sent.get(backend.name, 0.0)) for each in model.kinds)
        spent_s = sum(kind.tokens / kind.tokens_per_step[backend.name] for kind in kinds)
        if not spent_s:
            continue
        gain = Gain(0.0, 0.0, 0.0, OF)
        if backend.method is not Method.BASELINE:
            if backend.steps.answers < _MIN_ANSWERS:
                continue
            gain, _ = _gain(replace(model, kinds=kinds), backend, backend.steps, baseline)
        spent_s *= backend.steps.seconds
        present_s += spent_s
        without_s += spent_s * (1.0 - np.array((gain.share, gain.low, gain.high)))
    if not present_s:
        return Savings(missing="no answer of a replica in order has been measured")
    share, high, low = (float(saved) for saved in 1.0 - present_s / without_s)
    why = [f"{name}: {each}" for name, each in _judged(model) if isinstance(each, str)] if high < 0.0 else []
    return Savings(Gain(share, low, high, OF), "" if baseline is None else baseline.name, "; ".join(why))


def measured_baseline(model: ModelEvidence) -> BackendEvidence | None:
    """Return the baseline whose steps were measured on the most answers; None if those are too few."""
    found = max((each for each in model.backends if each.method is Method.BASELINE), key=_measured, default=None)
    return None if found is None or _measured(found) < _MIN_ANSWERS else found


def _measured(backend: BackendEvidence) -> float:
    """Return the number of answers on which the steps of a backend were measured."""
    return 0.0 if backend.steps is None else backend.steps.answers


def _no_baseline(model: ModelEvidence) -> str:
    """Return why a pool cannot be compared with a baseline; empty if it can.

    A calibration that nobody configured says nothing about the machines of a pool.
    """
    if measured_baseline(model) is not None or all(each.baseline_cost is not None for each in model.backends):
        return ""
    known = [f"{each.name} has {_measured(each):.0f}" for each in model.backends if each.method is Method.BASELINE]
    if known:
        return f"of a replica without speculation {_MIN_ANSWERS:.0f} measured answers are needed: {', '.join(known)}"
    return "no replica runs without speculation, and the policy's `calibration` names no machine to compare with"


def _judged(model: ModelEvidence) -> Iterator[tuple[str, Finding | str]]:
    """Yield each speculating backend with its finding, or with the reason why there is none."""
    baseline = measured_baseline(model)
    if _no_baseline(model):
        return
    for backend in model.backends:
        steps = backend.steps
        if backend.method is Method.BASELINE or backend.is_silent or not model.kinds:
            continue
        if steps is None or min(backend.answers, steps.answers) < _MIN_ANSWERS:
            yield backend.name, f"{_measured(backend):.0f} of {_MIN_ANSWERS:.0f} answers have been measured"
            continue
        gain, share = _gain(model, backend, steps, baseline)
        if not gain.is_worth_it:
            yield backend.name, f"a baseline in its place would save {gain.low:.0%} to {gain.high:.0%}, if anything"
            continue
        if share < NEARLY_ALL:
            yield backend.name, f"it loses on {share:.0%} of the output tokens only, and the policy sends it the others"
            continue
        per_step = sum(kind.tokens for kind in model.kinds)
        per_step /= sum(kind.tokens / kind.tokens_per_step[backend.name] for kind in model.kinds)
        compared = f"a baseline, by {backend.calibration}" if baseline is None else f"the baseline {baseline.name}"
        title = f"{backend.method} loses on {share:.0%} of the output tokens against {compared}"
        evidence = f"{backend.answers:,.0f} answers; {per_step:.2f} tokens per step expected of all requests, "
        evidence += f"steps of {1e3 * steps.seconds:.1f} ms at {steps.load[0]:.1f} requests"
        change = lines(model.name, backend.name, f"method: baseline # {backend.method}", "# without speculative_config")
        yield backend.name, Finding("losing_method", model.name, backend.name, title, gain, evidence, change)


def _gain(
    model: ModelEvidence, backend: BackendEvidence, steps: Steps, baseline: BackendEvidence | None
) -> tuple[Gain, float]:
    """Return what a baseline would gain on the requests of a backend, and the share of the tokens on which it gains.

    Without a measured baseline, the calibration's is used. Step times have the error of their fit, plus more at a load
    that the baseline has not seen.
    """
    rng = np.random.default_rng(0)
    variance = _MODEL**2 + _NOISE**2 / steps.answers + SPREAD**2 / max(1.0, backend.answers)
    if baseline is None or baseline.steps is None:
        assert backend.baseline_cost is not None
        row, present = np.array(backend.baseline_cost), np.array(backend.cost_by_k[backend.k])
        variance += _UNKNOWN**2
    else:
        row, present = np.array(baseline.steps.cost), None
        is_busier = steps.load[0] > 2.0 * baseline.steps.load[0]
        variance += _NOISE**2 / baseline.steps.answers + (_UNKNOWN**2 if is_busier else 0.0)
    fitted = np.array(steps.cost)
    error = np.exp(np.sqrt(variance) * rng.standard_normal(DRAWS))

    def step_s(load: Floats) -> Floats:
        changed = row @ load if present is None else (fitted @ load) * (row @ load) / (present @ load)
        return np.asarray(changed * error)

    tokens, own = (
        np.array(each)
        for each in zip(*((kind.tokens, kind.tokens_per_step[backend.name]) for kind in model.kinds), strict=True)
    )
    # The steps of the answers add up, so the mean is harmonic.
    fewer = float(tokens.sum() / (tokens / own).sum())
    time = relative_time(steps.load, steps.fitted_s, step_s, np.full(DRAWS, fewer))
    faster = float(np.median(time)) / fewer * own < 1.0
    return gain_of(1.0 - time, OF), float(tokens[faster].sum() / tokens.sum())
