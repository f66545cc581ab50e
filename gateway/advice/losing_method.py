"""Rule: a method that loses on nearly all traffic, against baseline or another method of the pool."""

from __future__ import annotations

from typing import Final

import numpy as np

from backends.speculation import Method
from gateway.advice.evidence import BackendEvidence, ModelEvidence, Steps
from gateway.advice.finding import Finding, Gain, gain_of, lines
from gateway.advice.relative_time import OF, Floats, cost_row, relative_time
from policies.learned.models.step_time import NOISE, seconds

NEARLY_ALL: Final = 0.9
"""Share of the output tokens on which a method must lose."""
DRAWS: Final = 400
_MIN_ANSWERS: Final = 30.0
"""A policy that learns soon sends few requests to a method that loses."""
_MODEL: Final = 0.05
"""Relative standard deviation of what a step would take at the load of another backend."""
_UNKNOWN: Final = 0.1
"""Relative standard deviation of a step time that was not measured at this load, or comes from a calibration."""


def losing_method(model: ModelEvidence) -> list[Finding]:
    """Return the speculating backends that lose on nearly all traffic."""
    findings = []
    for backend in model.backends:
        steps = backend.steps
        if backend.method is Method.BASELINE or backend.is_silent or steps is None:
            continue
        if min(backend.answers, steps.answers) < _MIN_ANSWERS or not model.kinds:
            continue
        best: tuple[Gain, float, str, BackendEvidence | None] | None = None
        for other in _alternatives(model, backend):
            gain, share = _gain(model, backend, steps, other)
            if share >= NEARLY_ALL and gain.is_worth_it and (best is None or gain.share > best[0].share):
                best = gain, share, _name(other), other
        if best is not None:
            findings.append(_finding(model, backend, steps, *best))
    return findings


def _alternatives(model: ModelEvidence, backend: BackendEvidence) -> list[BackendEvidence | None]:
    """Return measured backends of other methods; without a measured baseline also None, the calibration's."""
    measured: list[BackendEvidence | None] = [
        other
        for other in model.backends
        if other.method is not backend.method and other.steps is not None and other.steps.answers >= _MIN_ANSWERS
    ]
    if all(other is None or other.method is not Method.BASELINE for other in measured) and backend.baseline_cost:
        measured.append(None)
    return measured


def _gain(
    model: ModelEvidence, backend: BackendEvidence, steps: Steps, other: BackendEvidence | None
) -> tuple[Gain, float]:
    """Return the gain of another method on the requests of a backend, and the share of the tokens on which it gains.

    The tokens per step of a baseline are known, those of other methods have the error of their arm; step times have
    that of their fit, and more at a load that the other backend has not seen.
    """
    rng = np.random.default_rng(0)
    variance = _MODEL**2 + NOISE**2 / steps.answers + backend.noise**2 / backend.answers
    if other is None or other.steps is None:
        assert backend.baseline_cost is not None
        row, present = cost_row(backend.baseline_cost), cost_row(backend.cost_by_k[backend.k])
        variance += _UNKNOWN**2
    else:
        row, present = cost_row(other.steps.cost), None
        there, here = other.steps.load[1], steps.load[1]
        variance += NOISE**2 / other.steps.answers + (_UNKNOWN**2 if here > 2.0 * there else 0.0)
        variance += 0.0 if other.method is Method.BASELINE else other.noise**2 / other.answers
    fitted = cost_row(steps.cost)
    error = np.exp(np.sqrt(variance) * rng.standard_normal(DRAWS))

    def step_s(load: Floats) -> Floats:
        changed = row @ load if present is None else (fitted @ load) * (row @ load) / (present @ load)
        return np.asarray(changed * error)

    names = backend.name, None if other is None else other.name
    tokens = np.array([kind.tokens for kind in model.kinds])
    own, others = (
        np.array([1.0 if name is None else kind.tokens_per_step[name] for kind in model.kinds]) for name in names
    )
    # Steps that answers take are added up, so the means are harmonic.
    fewer = float((tokens / others).sum() / (tokens / own).sum())
    time = relative_time(steps.load, seconds(steps.cost, steps.load), step_s, np.full(DRAWS, fewer))
    faster = float(np.median(time)) / fewer * own / others < 1.0
    return gain_of(1.0 - time, OF), float(tokens[faster].sum() / tokens.sum())


def _name(other: BackendEvidence | None) -> str:
    return "baseline, by the calibration" if other is None else f"{other.method} ({other.name})"


def _finding(
    model: ModelEvidence,
    backend: BackendEvidence,
    steps: Steps,
    gain: Gain,
    share: float,
    name: str,
    other: BackendEvidence | None,
) -> Finding:
    per_step = sum(kind.tokens * kind.tokens_per_step[backend.name] for kind in model.kinds)
    per_step /= sum(kind.tokens for kind in model.kinds)
    method = Method.BASELINE if other is None else other.method
    changes = [f"method: {method} # {backend.method}"]
    if other is None or not other.speculative_config:
        changes.append("# without speculative_config")
    else:
        changes.append("speculative_config:")
        changes += [f"  {key}: {value}" for key, value in other.speculative_config.items()]
    return Finding(
        "losing_method",
        model.name,
        backend.name,
        f"{backend.method} loses on {share:.0%} of the output tokens against {name}",
        gain,
        f"{backend.answers:,.0f} answers with {per_step:.2f} tokens per step, steps of {1e3 * steps.seconds:.1f} ms at "
        f"{steps.load[1]:.1f} requests",
        lines(model.name, backend.name, *changes),
    )
