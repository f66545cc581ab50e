"""The parts of a snapshot: a backend, and a model with what its policy says of itself."""

from __future__ import annotations

import math
import time

from backends.backend import Backend
from gateway.dashboard.document import BackendView, Engine, Gain, ModelView, Queue, Rules, Version
from gateway.dashboard.recent import Measured
from gateway.service.assembly import Gateway
from gateway.service.policy_versions import PolicyVersions
from policies.guarded.policy import learned_of
from policies.roles import Freezable


def backend_view(gateway: Gateway, backend: Backend, measured: Measured, requests_per_s: float) -> BackendView:
    """Return a backend.

    Parameters
    ----------
    requests_per_s
        Of all backends of the model.
    """
    load, policy = backend.load, gateway.models[backend.model].policy
    reasons = policy.outlier_ejection.reasons if isinstance(policy, Freezable) else {}
    return BackendView(
        backend.name,
        backend.method.value,
        backend.num_speculative_tokens,
        backend.weight,
        backend.simulated,
        backend.state.value,
        backend.state_reason,
        reasons.get(backend.name),
        backend.in_flight + load.others,
        backend.in_flight,
        Engine(load.running, load.waiting, load.kv_usage, time.monotonic() - load.at_s) if load.at_s else None,
        measured.acceptance,
        measured.step_s,
        None,
        slowdown_of(gateway, backend),
        measured.requests_per_s,
        measured.output_tokens_per_s,
        measured.requests_per_s / requests_per_s if requests_per_s else None,
        measured.failed,
        measured.ttft,
        measured.tpot,
        None,
        point_of(gateway, backend, measured),
    )


def slowdown_of(gateway: Gateway, backend: Backend) -> float | None:
    """Return a backend's step time over the expected one, at least 1; None if the policy expects none."""
    learned = learned_of(gateway.models[backend.model].policy)
    model = None if learned is None else learned.predictor.backend_models.get(backend.name)
    return None if model is None else model.slowness


def point_of(gateway: Gateway, backend: Backend, measured: Measured) -> list[float | None]:
    """Return the values of a backend in the order of `SERIES`."""
    accepted, ttft, tpot = measured.acceptance, measured.ttft_of_late, measured.tpot_of_late
    is_late = accepted is not None and accepted.window_s is not None
    return [
        backend.in_flight + backend.load.others,
        backend.load.waiting,
        backend.load.kv_usage,
        measured.requests_per_s,
        measured.output_tokens_per_s,
        measured.step_s,
        slowdown_of(gateway, backend),
        accepted.rate if accepted is not None and is_late else None,
        accepted.tokens_per_step if accepted is not None and is_late else None,
        None if ttft is None else ttft.p50_s,
        None if ttft is None else ttft.p95_s,
        None if tpot is None else tpot.p50_s,
        None if tpot is None else tpot.p95_s,
    ]


def model_view(gateway: Gateway, name: str, backends: list[BackendView]) -> ModelView:
    """Return a model."""
    model, versions, queue = gateway.models[name], gateway.policy_versions.get(name), gateway.relay.queues.get(name)
    policy = model.policy
    rules = None if versions is None else rules_of(versions)
    frozen = isinstance(policy, Freezable) and policy.guardrail.frozen
    pinned = None if rules is None else rules.pinned
    decides = "least_loaded" if frozen else policy.name
    return ModelView(
        name,
        policy.name,
        decides if pinned is None else f"rules, version {pinned}",
        bool(backends) and all(backend.simulated for backend in backends),
        model.traffic.qps(time.monotonic()),
        None if queue is None else Queue(queue.waiting, queue.waiting_bytes),
        backends,
        gain_of(policy) if isinstance(policy, Freezable) else None,
        None,
        rules,
        [],
    )


def gain_of(policy: Freezable) -> Gain:
    """Return the comparison with `least_loaded`."""
    guardrail = policy.guardrail
    ratio = guardrail.ratio
    return Gain(
        None if math.isnan(ratio) else ratio, None, None, 0.95, guardrail.control_share(), 0.0, 0.0, guardrail.frozen
    )


def rules_of(versions: PolicyVersions) -> Rules:
    """Return the versions of the rules."""
    described = versions.describe()
    return Rules(
        [Version(each["version"], each["written_s"]) for each in described["versions"]],
        described["pinned"],
        described["pinned_before"],
    )
