"""Evidence from what `learned` has learned of a model's backends."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from backends.backend import Candidate
from backends.speculation import Method
from gateway.rooms.advice.draft_length import MAX_K
from gateway.rooms.advice.evidence import BackendEvidence, Kind, ModelEvidence, Positions, Steps
from policies.learned.belief import tokens_per_step
from policies.learned.policy import Learned
from policies.learned.prior import StepCost, expected_step
from policies.learned.replica import STEPS, KnownReplica, met_by, possible
from policies.learned.table import answers_of
from policies.statistics import Key, Sums

_MOST_KINDS: Final = 2000


def add_learned(
    model: ModelEvidence,
    policy: Learned,
    candidates: Sequence[Candidate],
    simulated_by: dict[str, str] | None = None,
) -> ModelEvidence:
    """Return evidence with what a policy has learned; `simulated_by` are the calibrations of simulated backends."""
    known, simulated_by, calibration = policy.known, simulated_by or {}, policy.settings.calibration
    replicas = {**known.replicas}  # a copy: another thread adds to them
    replicas = {each.name: replicas[each.name] for each in candidates if each.name in replicas}
    sums = possible(policy.statistics.buckets(STEPS))
    steps = {name: _steps(sums[name], replica) for name, replica in replicas.items() if name in sums}
    is_given = "calibration" in policy.settings.model_fields_set

    def of(backend: BackendEvidence) -> BackendEvidence:
        used, replica = simulated_by.get(backend.name, calibration), replicas.get(backend.name)
        return replace(
            backend,
            answers=0.0 if replica is None else known.per_step.count(replica.arm, ()),
            steps=steps.get(backend.name),
            is_silent=backend.name in known.detector.silent,
            calibration=used,
            baseline_cost=expected_step(used, Method.BASELINE, 0) if is_given or backend.name in simulated_by else None,
            cost_by_k=_costs(used, backend),
        )

    answered: defaultdict[Key, dict[str, float]] = defaultdict(dict)
    for name, kind, _, tokens in answers_of(policy.statistics):
        answered[kind][name] = tokens
    totals = {kind: sum(tokens.values()) for kind, tokens in answered.items()}
    batches = {name: steps[name].load[0] if name in steps else 1.0 for name in replicas}
    kinds = tuple(
        Kind(
            totals[kind],
            {name: tokens_per_step(known, one, kind, batches[name]) for name, one in replicas.items()},
            {name: tokens / totals[kind] for name, tokens in answered[kind].items()},
        )
        for kind in heapq.nlargest(_MOST_KINDS, totals, totals.__getitem__)
        if totals[kind] > 0.0
    )
    return replace(model, backends=tuple(map(of, model.backends)), kinds=kinds)


def positions_of(drafts: int, accepted: Sequence[int]) -> Positions | None:
    """Return the acceptance by position of an engine; None if it reports none."""
    return Positions(drafts, tuple(map(float, accepted))) if drafts and accepted else None


def _costs(calibration: str, backend: BackendEvidence) -> Mapping[int, StepCost]:
    ks = () if backend.method is Method.BASELINE else {*range(1, MAX_K + 1), backend.k}
    return {k: expected_step(calibration, backend.method, k) for k in ks}


def _steps(sums: Sums, replica: KnownReplica) -> Steps:
    seconds, load = met_by(sums)
    return Steps(sums[0], seconds, load, replica.cost(load[0]))
