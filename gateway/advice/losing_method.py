"""Rule: a method that loses on nearly all traffic, against baseline or another method of the pool."""

from __future__ import annotations

from typing import Final

import numpy as np

from backends.speculation import Method
from gateway.advice.evidence import BackendEvidence, ModelEvidence, Steps
from gateway.advice.finding import MIN_ANSWERS, Finding, Gain, gain_of, lines
from policies.learned.models.step_time import NOISE, seconds

NEARLY_ALL: Final = 0.9
"""Share of the output tokens on which a method must lose."""
DRAWS: Final = 400
_UNKNOWN: Final = 0.1
"""Relative standard deviation of a step time that was not measured at this load, or comes from a calibration."""
_OF: Final = "time per output token"


def losing_method(model: ModelEvidence) -> list[Finding]:
    """Return the speculating backends that lose on nearly all traffic."""
    findings = []
    for backend in model.backends:
        steps = backend.steps
        if backend.method is Method.BASELINE or backend.is_silent or steps is None:
            continue
        if min(backend.answers, steps.answers) < MIN_ANSWERS or not model.kinds:
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
        if other.method is not backend.method and other.steps is not None and other.steps.answers >= MIN_ANSWERS
    ]
    if all(other is None or other.method is not Method.BASELINE for other in measured) and backend.baseline_cost:
        measured.append(None)
    return measured


def _gain(
    model: ModelEvidence, backend: BackendEvidence, steps: Steps, other: BackendEvidence | None
) -> tuple[Gain, float]:
    """Return the gain of another method at the load of a backend, and the share of the tokens on which it is faster."""
    own_s = seconds(steps.cost, steps.load)
    if other is None or other.steps is None:
        assert backend.baseline_cost is not None
        present = backend.cost_by_k.get(backend.k, backend.baseline_cost)
        other_s = own_s * seconds(backend.baseline_cost, steps.load) / seconds(present, steps.load)
        spread, noise, answers = _UNKNOWN, 0.0, 1.0
    else:
        other_s = seconds(other.steps.cost, steps.load)
        there, here = other.steps.load[1], steps.load[1]
        spread = _UNKNOWN if max(there, here) > 2.0 * min(there, here) else 0.0
        spread = float(np.hypot(spread, NOISE / np.sqrt(other.steps.answers)))
        noise, answers = (0.0, 1.0) if other.method is Method.BASELINE else (other.noise, other.answers)
    own = own_other = lost = total = 0.0
    for kind in model.kinds:
        mine_s = kind.tokens * own_s / kind.tokens_per_step[backend.name]
        other_per_step = 1.0 if other is None else kind.tokens_per_step[other.name]
        others_s = kind.tokens * other_s / other_per_step
        own, own_other, total = own + mine_s, own_other + others_s, total + kind.tokens
        lost += kind.tokens * (others_s < mine_s)
    variance = spread**2 + NOISE**2 / steps.answers + backend.noise**2 / backend.answers + noise**2 / answers
    logs = np.log(own_other / own) + np.sqrt(variance) * np.random.default_rng(0).standard_normal(DRAWS)
    return gain_of(1.0 - np.exp(logs), _OF), lost / total


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
