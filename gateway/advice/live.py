"""Advice from the live figures of a gateway process."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Any, Final

from backends.backend import Backend, State
from backends.draft_schedule import Speculation
from backends.engine_metrics import EngineMetrics
from gateway.advice.advise import advise, document
from gateway.advice.evidence import BackendEvidence, Contradiction, ModelEvidence
from gateway.advice.gather import add_learned, positions_of
from gateway.advice.settings import calibration_of, evidence_of
from gateway.service.assembly import Gateway
from policies.build import learned_of

KEPT_S: Final = 15.0


class Advice:
    """The advice of a gateway process. It takes a fit, so an answer is given again for `KEPT_S` seconds."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._lock = asyncio.Lock()
        self._kept: dict[str, dict[str, Any]] = {}
        self._kept_at_s = -KEPT_S

    async def by_model(self) -> dict[str, dict[str, Any]]:
        """Return whether each model's policy learns, the answers that were measured by backend, and the findings."""
        async with self._lock:
            if time.monotonic() - self._kept_at_s >= KEPT_S:
                settings = self._gateway.settings.models
                described = await asyncio.to_thread(  # it reads tokenizers
                    lambda: [evidence_of(name, each) for name, each in settings.items()]
                )
                models = {model.name: _live(self._gateway, model) for model in described}
                self._kept = await asyncio.to_thread(_advise_all, self._gateway, models)
                self._kept_at_s = time.monotonic()
            return self._kept


def _live(gateway: Gateway, model: ModelEvidence) -> ModelEvidence:
    """Add what the probes of a model tell, also of replicas that were discovered."""
    configured = {backend.name: backend for backend in model.backends}
    backends = []
    for member in gateway.pool.of(model.name):
        backend = configured.get(member.name) or BackendEvidence(
            member.name,
            member.said.method,
            member.said.schedule.k,
            speculative_config=member.speculative_config,
        )
        engine = gateway.pool.engine(member)
        if engine is None:
            backends.append(replace(backend, has_metrics=member.state is not State.UP))
            continue
        backends.append(
            replace(
                backend,
                contradiction=_contradiction(member, engine),
                positions=positions_of(engine.drafts, engine.accepted_per_position),
                prefix_caching=None if engine.prefix_caching is None else bool(engine.prefix_caching),
                prefix_queries=engine.prefix_queries,
                prefix_hits=engine.prefix_hits,
                minutes=tuple(gateway.pool.watch(member).occupancy.minutes),
            )
        )
    return replace(model, backends=tuple(backends))


def _contradiction(backend: Backend, engine: EngineMetrics) -> Contradiction | None:
    if (text := backend.contradiction) is None:
        return None
    counters = f"{engine.drafts:,} drafts of {engine.draft_tokens:,} tokens, {engine.generation_tokens:,} output tokens"
    return Contradiction(text, Speculation(backend.method, backend.draft_schedule), counters)


def _advise_all(gateway: Gateway, models: dict[str, ModelEvidence]) -> dict[str, dict[str, Any]]:
    reported = _reported(gateway)
    advised = {}
    for name, model in models.items():
        policy = learned_of(gateway.models[name].policy)
        backends = tuple(
            replace(backend, reported_share=share[0] / share[1], output_tokens=int(share[1]))
            if (share := reported.get((name, backend.name))) is not None
            else backend
            for backend in model.backends
        )
        evidence = replace(model, backends=backends)
        if policy is not None:
            calibration = partial(calibration_of, gateway.settings.models[name])
            evidence = add_learned(evidence, policy, list(gateway.pool.of(name)), calibration)
        advised[name] = {
            "learns": policy is not None,
            "answers": {
                backend.name: round(backend.steps.answers) if backend.steps else 0 for backend in evidence.backends
            },
            "findings": document(advise(evidence)),
        }
    return advised


def _reported(gateway: Gateway) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the output tokens whose steps the engine reported, and all, by model and backend."""
    told: dict[tuple[str, str], float] = {}
    all_tokens: dict[tuple[str, str], float] = {}
    for family in gateway.metrics.registry.collect():
        for sample in family.samples:
            key = (sample.labels.get("model", ""), sample.labels.get("backend", ""))
            if sample.name == "gateway_step_tokens_total" and sample.labels["source"] == "engine":
                told[key] = told.get(key, 0.0) + sample.value
            elif sample.name == "gateway_output_tokens_total":
                all_tokens[key] = all_tokens.get(key, 0.0) + sample.value
    return {key: (told.get(key, 0.0), tokens) for key, tokens in all_tokens.items() if tokens > 0}
