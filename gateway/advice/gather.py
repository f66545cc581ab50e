"""Evidence from what `learned` has learned of a model's backends."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from backends.backend import Candidate
from backends.draft_schedule import effective_k
from backends.speculation import Method
from gateway.advice.draft_length import MAX_K
from gateway.advice.evidence import BackendEvidence, Kind, ModelEvidence, Positions, Steps
from policies.arm import arm_of
from policies.learned.models.acceptance import ACCEPTANCE, ARM, BACKEND
from policies.learned.models.backend_model import FittedModels
from policies.learned.models.length import LENGTH
from policies.learned.models.prior import StepCost, expected_step
from policies.learned.models.step_time import STEPS, TERMS, of_backends
from policies.learned.policy import Learned
from policies.statistics import Key, Sums

_MOST_KINDS: Final = 2000
_WEIGHT: Final = 2
_SECONDS: Final = _WEIGHT + TERMS * (TERMS + 1) // 2
"""Indices into the sums of step times: of the weights (and behind it the loads), and of the seconds."""


def add_learned(
    model: ModelEvidence,
    policy: Learned,
    candidates: Sequence[Candidate],
    simulated_by: dict[str, str] | None = None,
) -> ModelEvidence:
    """Return evidence with what a policy has learned; `simulated_by` are the calibrations of simulated backends."""
    priors = {
        each.name: expected_step(
            policy.settings.calibration, each.method, effective_k(each.method, each.num_speculative_tokens)
        )
        for each in candidates
    }
    fitted = policy.fitted(priors)
    steps = of_backends(policy.statistics.buckets(STEPS))
    answers: dict[str, float] = {}
    for key, sums in policy.statistics.buckets(ACCEPTANCE).items():
        answers[key[ARM]] = answers.get(key[ARM], 0.0) + sums[0]
    named = {each.name: policy.settings.calibration for each in candidates}
    calibrations = named | (simulated_by or {})
    of_its_own = calibrations if "calibration" in policy.settings.model_fields_set else simulated_by or {}
    by_name = {each.name: each for each in candidates}
    backends = tuple(
        replace(
            backend,
            answers=answers.get(arm_of(by_name[backend.name]), 0.0),
            noise=fitted.acceptance.spread(arm_of(by_name[backend.name])),
            steps=_steps(steps.get(backend.name), fitted.steps[backend.name]),
            is_silent=backend.name in policy.drafters.silent,
            calibration=calibrations[backend.name],
            baseline_cost=expected_step(of_its_own[backend.name], Method.BASELINE, 0)
            if backend.name in of_its_own
            else None,
            cost_by_k=_costs(calibrations[backend.name], backend),
        )
        for backend in model.backends
    )
    return replace(model, backends=backends, kinds=_kinds(policy, fitted, candidates))


def positions_of(drafts: int, accepted: Sequence[int]) -> Positions | None:
    """Return the acceptance by position of an engine; None if it reports none."""
    return Positions(drafts, tuple(map(float, accepted))) if drafts and accepted else None


def _costs(calibration: str, backend: BackendEvidence) -> Mapping[int, StepCost]:
    ks = () if backend.method is Method.BASELINE else {*range(1, MAX_K + 1), backend.k}
    return {k: expected_step(calibration, backend.method, k) for k in ks}


def _steps(sums: Sums | None, cost: StepCost) -> Steps | None:
    if sums is None or sums[_WEIGHT] <= 0:
        return None
    requests, context, prompts = (sums[_WEIGHT + 1 + term] / sums[_WEIGHT] for term in range(TERMS - 1))
    return Steps(sums[0], sums[_SECONDS] / sums[_WEIGHT], (1.0, requests, context, prompts), cost)


def _kinds(policy: Learned, fitted: FittedModels, candidates: Sequence[Candidate]) -> tuple[Kind, ...]:
    buckets = policy.statistics.buckets(LENGTH)
    largest = sorted(buckets.items(), key=lambda item: -item[1][0])[:_MOST_KINDS]
    sent: defaultdict[Key, dict[str, float]] = defaultdict(dict)
    for key, sums in policy.statistics.buckets(ACCEPTANCE).items():
        sent[key[BACKEND + 1 :]][key[BACKEND]] = sums[0]
    return tuple(
        Kind(
            sums[0] * math.exp(sums[1] / sums[0]),
            {each.name: fitted.acceptance.tokens_per_step(arm_of(each), each.name, key) for each in candidates},
            {each.name: sent[key].get(each.name, 0.0) / sums[0] for each in candidates},
        )
        for key, sums in largest
        if sums[0] > 0
    )
