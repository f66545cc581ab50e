"""Advice from the live figures of a gateway process, and from what `learned` has learned about its backends."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI
from prometheus_client.samples import Sample

from backends import background
from backends.backend import Backend, Candidate
from backends.calibration.load import load_calibration
from backends.draft_schedule import Speculation
from backends.speculation import Method
from gateway.gateway import Room
from gateway.rooms.advice.advise import advise
from gateway.rooms.advice.draft_length import MAX_K
from gateway.rooms.advice.evidence import BackendEvidence, Contradiction, Kind, ModelEvidence, Positions, Steps
from gateway.rooms.advice.finding import Advisor, Comparer
from gateway.rooms.advice.losing_method import of_speculation
from policies.build import learned_of
from policies.learned.belief import tokens_per_step
from policies.learned.policy import Learned
from policies.learned.prior import StepCost, expected_step
from policies.learned.replica import STEPS, KnownReplica, met_by, possible
from policies.learned.table import answers_of
from policies.statistics import Key, Sums

if TYPE_CHECKING:
    from gateway.gateway import Gateway

_MOST_KINDS: Final = 2000


KEPT_S: Final = 15.0
Contexts = dict[tuple[str, str], dict[float, float]]
"""Number of requests by their most tokens, by model and backend."""


def add_learned(
    model: ModelEvidence,
    policy: Learned,
    candidates: Sequence[Candidate],
    simulated_by: dict[str, str] | None = None,
) -> ModelEvidence:
    """Add what a policy has learned to evidence; `simulated_by` are the calibrations of simulated backends."""
    known, simulated_by, calibration = policy.known, simulated_by or {}, policy.settings.calibration
    replicas = {**known.replicas}  # a copy: another thread adds replicas
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


class AdviceRoom(Room):
    """The advice of a gateway process. It requires a fit, so an answer is reused for `KEPT_S` seconds."""

    order = 6

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._lock = asyncio.Lock()
        self._kept: dict[str, dict[str, Any]] = {}
        self._kept_at_s = -KEPT_S

    def add_routes(self, app: FastAPI) -> None:
        """Add `/admin/advice`."""

        @app.get("/admin/advice", tags=["admin"])
        async def advice() -> dict[str, Any]:
            """Return the gain from speculation, and what to change in each model's backends, with the evidence."""
            async with self._lock:
                if time.monotonic() - self._kept_at_s >= KEPT_S:
                    contexts = await asyncio.to_thread(lambda: contexts_of(self.gateway.metrics.samples()))
                    self._kept, self._kept_at_s = {}, time.monotonic()
                    for name in [*self.gateway.models]:
                        with background.guarded("policies", of=f"the advice for {name}"):
                            evidence = self._evidence(name, contexts)
                            self._kept[name] = await asyncio.to_thread(self._advised, evidence)
                return {"models": self._kept}

    def _evidence(self, name: str, contexts: Contexts) -> ModelEvidence:
        """Return the evidence from a model's settings and probes, and the lengths of its requests."""
        members = self.gateway.pool.of(name)
        return ModelEvidence(
            name,
            tuple(evidence_of(each, contexts.get((name, each.name), {})) for each in members),
            troubles=self.gateway.models[name].troubles.found,
            compared=frozenset().union(*(room.compared(name) for room in self._comparers())),
        )

    def _advised(self, evidence: ModelEvidence) -> dict[str, Any]:
        """Return whether the policy of a model learns, the number of measured answers, and the findings."""
        learned = learned_of(self.gateway.models[evidence.name].policy)
        if learned is not None:
            members = list(self.gateway.pool.of(evidence.name))
            evidence = add_learned(evidence, learned, members, self._calibrations(evidence.name))
        advisors = [room for room in self.gateway.rooms if isinstance(room, Advisor)]
        of_rooms = [each for room in advisors for each in room.findings(evidence.name)]
        return {
            "learns": learned is not None,
            "speculation": asdict(of_speculation(evidence)),
            "answers": {each.name: round(each.steps.answers) if each.steps else 0 for each in evidence.backends},
            "premises": [
                f"Steps that were not measured here are by a calibration: {each}"
                for name in dict.fromkeys(each.calibration for each in evidence.backends if each.calibration)
                for each in load_calibration(name).premises(
                    b.method for b in evidence.backends if b.calibration == name
                )
            ],
            "comparing": " ".join(filter(None, (room.comparing(evidence.name) for room in self._comparers()))),
            "findings": [asdict(each) for each in (*advise(evidence), *of_rooms)],
        }

    def _comparers(self) -> list[Comparer]:
        return [room for room in self.gateway.rooms if isinstance(room, Comparer)]

    def _calibrations(self, model: str) -> dict[str, str]:
        """Return the calibrations of the simulated backends of a model, by name."""
        backends = self.gateway.settings.models[model].backends
        return {name: each.simulate.calibration for name, each in backends.items() if each.simulate is not None}


def contexts_of(samples: Iterable[Sample]) -> Contexts:
    """Return the lengths of each backend's requests."""
    found: Contexts = defaultdict(lambda: defaultdict(float))
    for sample in samples:
        if sample.name == "gateway_context_tokens_bucket":  # of each method that the backend has had
            found[sample.labels["model"], sample.labels["backend"]][float(sample.labels["le"])] += sample.value
    return found


def evidence_of(backend: Backend, contexts: Mapping[float, float]) -> BackendEvidence:
    """Return the evidence from a backend's settings and probes."""
    engine, said, flags, limit = backend.engine.metrics, backend.declared, backend.flags, backend.drafter_limit
    known = BackendEvidence(backend.name, said.method, said.schedule.k, flags=flags, limit=limit, contexts=contexts)
    if engine is None:
        return known
    contradiction = None
    if (text := backend.contradiction) is not None:
        counters = f"{engine.drafts:,} drafts of {engine.draft_tokens:,} tokens"
        counters += f", {engine.generation_tokens:,} output tokens"
        contradiction = Contradiction(text, Speculation(backend.method, backend.draft_schedule), counters)
    # If drafts differ in length, counts by position do not show how many of the longer ones are accepted.
    is_even = not (said.schedule.by_batch or said.schedule.adaptive or backend.draft_depth)
    return replace(
        known,
        contradiction=contradiction,
        positions=positions_of(engine.drafts, engine.accepted_per_position) if is_even else None,
        minutes=tuple(backend.engine.occupancy.minutes),
    )
