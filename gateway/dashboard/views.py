"""The parts of a snapshot: a backend, and a model with what its policy says of itself."""

from __future__ import annotations

import math
import time

import orjson

from backends.backend import Backend
from gateway.dashboard.document import (
    Accuracy,
    BackendView,
    DecisionView,
    Engine,
    Gain,
    ModelView,
    Queue,
    Rules,
    Version,
)
from gateway.dashboard.recent import Measured
from gateway.service.assembly import Gateway
from gateway.service.policy_versions import PolicyVersions
from policies.build import learned_of
from policies.guarded.guardrail import CONFIDENCE, Guardrail
from policies.learned.belief import present_step_s
from policies.learned.policy import Learned
from policies.policy import Policy
from policies.roles import Freezable


def backend_view(
    gateway: Gateway, backend: Backend, measured: Measured, requests_per_s: float, accuracy: Accuracy | None
) -> BackendView:
    """Return a backend."""
    load, policy, requests = backend.load, gateway.models[backend.model].policy, _requests(backend)
    learned = learned_of(policy)
    model = None if learned is None else learned.predictor.backend_models.get(backend.name)
    return BackendView(
        name=backend.name,
        method=backend.said.method.value,
        k=backend.said.schedule.k,
        contradiction=backend.contradiction,
        difference=None if backend.difference is None else str(backend.difference),
        weight=backend.weight,
        simulated=backend.simulated,
        state=backend.state.value,
        reason=backend.state_reason,
        outlier=policy.outlier_ejection.reasons.get(backend.name) if isinstance(policy, Freezable) else None,
        silence=_silence(policy, backend),
        in_flight=requests,
        in_flight_here=backend.in_flight,
        engine=Engine(load.running, load.waiting, load.kv_usage, time.monotonic() - load.at_s) if load.at_s else None,
        acceptance=measured.acceptance,
        step_s=measured.step_s,
        fitted_step_s=None if model is None else present_step_s(model, requests),
        slowdown=_slowdown(policy, backend),
        requests_per_s=measured.requests_per_s,
        output_tokens_per_s=measured.output_tokens_per_s,
        share=measured.requests_per_s / requests_per_s if requests_per_s else None,
        failed=measured.failed,
        ttft=measured.ttft,
        tpot=measured.tpot,
        accuracy=accuracy,
        point=point_of(gateway, backend, measured),
    )


def point_of(gateway: Gateway, backend: Backend, measured: Measured) -> list[float | None]:
    """Return the values of a backend in the order of `SERIES`."""
    accepted, ttft, tpot = measured.acceptance, measured.ttft_of_late, measured.tpot_of_late
    if accepted is not None and accepted.window_s is None:
        accepted = None  # nothing of late
    return [
        _requests(backend),
        backend.load.waiting,
        backend.load.kv_usage,
        measured.requests_per_s,
        measured.output_tokens_per_s,
        measured.step_s,
        _slowdown(gateway.models[backend.model].policy, backend),
        None if accepted is None else accepted.rate,
        None if accepted is None else accepted.tokens_per_step,
        None if ttft is None else ttft.p50_s,
        None if ttft is None else ttft.p95_s,
        None if tpot is None else tpot.p50_s,
        None if tpot is None else tpot.p95_s,
    ]


def _requests(backend: Backend) -> int:
    return backend.in_flight + backend.load.others


def _silence(policy: Policy, backend: Backend) -> str | None:
    silence = policy.drafters.silent.get(backend.name) if isinstance(policy, Freezable) else None
    return None if silence is None else str(silence)


def _slowdown(policy: Policy, backend: Backend) -> float | None:
    learned = learned_of(policy)
    return None if learned is None else learned.outlier_ejection.step_ratio(backend.name, learned.clock())


def model_view(
    gateway: Gateway, name: str, backends: list[BackendView], belief: bytes | None, decisions: list[DecisionView]
) -> ModelView:
    """Return a model; `belief` is JSON."""
    model, versions, queue = gateway.models[name], gateway.policy_versions.get(name), gateway.relay.queues.get(name)
    policy = model.policy
    gain = gain_of(policy.guardrail) if isinstance(policy, Freezable) else None
    rules = rules_of(versions) if versions is not None and isinstance(policy, Learned) else None
    decides = policy.name if rules is None or rules.pinned is None else f"rules, version {rules.pinned}"
    return ModelView(
        name,
        policy.name,
        "least_loaded" if gain is not None and gain.frozen else decides,
        bool(backends) and all(backend.simulated for backend in backends),
        model.traffic.qps(time.monotonic()),
        None if queue is None else Queue(queue.waiting, queue.waiting_bytes),
        backends,
        gain,
        None if belief is None else orjson.Fragment(belief),
        rules,
        decisions,
    )


def gain_of(guardrail: Guardrail) -> Gain:
    """Return the comparison with `least_loaded`."""
    found = guardrail.comparison(CONFIDENCE)
    ratio, low, high = (None if math.isnan(number) else number for number in (found.ratio, found.low, found.high))
    needed_s = guardrail.needed_block_s()
    return Gain(ratio, low, high, CONFIDENCE, guardrail.share(), found.own, found.control, needed_s, guardrail.frozen)


def rules_of(versions: PolicyVersions) -> Rules:
    """Return the versions of the rules."""
    described = versions.describe()
    return Rules([Version(**each) for each in described["versions"]], described["pinned"])
