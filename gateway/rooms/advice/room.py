"""Advice from the live figures of a gateway process."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI
from prometheus_client.samples import Sample

from backends import background
from backends.backend import Backend
from backends.calibration.load import load_calibration
from backends.draft_schedule import Speculation
from gateway.gateway import Room
from gateway.rooms.advice.advise import advise
from gateway.rooms.advice.evidence import BackendEvidence, Contradiction, ModelEvidence
from gateway.rooms.advice.finding import Advisor, Comparer, Finding
from gateway.rooms.advice.gather import add_learned, positions_of
from gateway.rooms.advice.losing_method import of_speculation
from policies.build import learned_of

if TYPE_CHECKING:
    from gateway.gateway import Gateway

KEPT_S: Final = 15.0


Contexts = dict[tuple[str, str], dict[float, float]]
"""How many requests had up to so many tokens, by model and backend."""


class AdviceRoom(Room):
    """The advice of a gateway process. It takes a fit, so an answer is given again for `KEPT_S` seconds."""

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
            """Return what speculation gains, and what to change in each model's backends, with the evidence."""
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
        """Return what the settings and the probes of a model tell, and how long its requests were."""
        members = self.gateway.pool.of(name)
        return ModelEvidence(
            name,
            tuple(evidence_of(each, contexts.get((name, each.name), {})) for each in members),
            troubles=self.gateway.models[name].troubles.found,
            compared=frozenset().union(
                *(room.compared(name) for room in self.gateway.rooms if isinstance(room, Comparer))
            ),
        )

    def _advised(self, evidence: ModelEvidence) -> dict[str, Any]:
        """Return whether the policy of a model learns, the answers that were measured, and the findings."""
        learned = learned_of(self.gateway.models[evidence.name].policy)
        if learned is not None:
            members = list(self.gateway.pool.of(evidence.name))
            evidence = add_learned(evidence, learned, members, self._calibrations(evidence.name))
        return {
            "learns": learned is not None,
            "speculation": asdict(of_speculation(evidence)),
            "answers": {each.name: round(each.steps.answers) if each.steps else 0 for each in evidence.backends},
            "premises": [
                f"Steps that were not measured here are by a calibration: {each}"
                for name in dict.fromkeys(each.calibration for each in evidence.backends if each.calibration)
                for each in load_calibration(name).premises(())
            ],
            "findings": [asdict(each) for each in (*advise(evidence), *self._of_rooms(evidence.name))],
        }

    def _of_rooms(self, model: str) -> Iterator[Finding]:
        return (each for room in self.gateway.rooms if isinstance(room, Advisor) for each in room.findings(model))

    def _calibrations(self, model: str) -> dict[str, str]:
        """Return the calibrations of the simulated backends of a model, by name."""
        backends = self.gateway.settings.models[model].backends
        return {name: each.simulate.calibration for name, each in backends.items() if each.simulate is not None}


def contexts_of(samples: Iterable[Sample]) -> Contexts:
    """Return how long the requests of each backend were."""
    found: Contexts = defaultdict(dict)
    for sample in samples:
        if sample.name == "gateway_context_tokens_bucket":
            found[sample.labels["model"], sample.labels["backend"]][float(sample.labels["le"])] = sample.value
    return found


def evidence_of(backend: Backend, contexts: Mapping[float, float]) -> BackendEvidence:
    """Return what the settings and the probes of a backend tell."""
    engine, said, flags, limit = backend.engine.metrics, backend.said, backend.flags, backend.drafter_limit
    known = BackendEvidence(backend.name, said.method, said.schedule.k, flags=flags, limit=limit, contexts=contexts)
    if engine is None:
        return known
    contradiction = None
    if (text := backend.contradiction) is not None:
        counters = f"{engine.drafts:,} drafts of {engine.draft_tokens:,} tokens"
        counters += f", {engine.generation_tokens:,} output tokens"
        contradiction = Contradiction(text, Speculation(backend.method, backend.draft_schedule), counters)
    # Of drafts of unlike lengths, the counts by position do not tell how many of the longer ones are accepted.
    is_even = not (said.schedule.by_batch or said.schedule.adaptive or backend.draft_depth)
    return replace(
        known,
        contradiction=contradiction,
        positions=positions_of(engine.drafts, engine.accepted_per_position) if is_even else None,
        minutes=tuple(backend.engine.occupancy.minutes),
    )
