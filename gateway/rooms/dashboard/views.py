"""The parts of a snapshot: a backend, and a model with what its policy reports about itself.

Times are in seconds, rates per second, shares and ratios plain numbers (0.25, not 25). None means unknown: nothing was
observed, or the engine does not report it. A snapshot has no keys, names of keys or addresses, and no request text but
the first words of templates, if the recorder may write whole texts.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import orjson

from backends.contradictions import unlike_answers
from backends.health import SERVING, State
from backends.watch import Watch
from gateway.rooms.dashboard.decisions import SampledDecisions
from gateway.rooms.dashboard.recent import Document, Measured
from gateway.routing.model import Model
from policies.build import learned_of
from policies.guarded.guardrail import CONFIDENCE, Guardrail
from policies.learned.belief import present_step_s
from policies.learned.policy import Learned

if TYPE_CHECKING:
    from gateway.gateway import Gateway


def backend_view(served: Model, watch: Watch, measured: Measured, requests_per_s: float) -> Document:
    """Return the view of a backend; `requests_per_s` is its model's rate."""
    backend, detector, learned = watch.backend, served.detector, learned_of(served.policy)
    load = backend.load
    replica = None if learned is None else learned.known.replicas.get(backend.name)
    requests = backend.in_flight + load.others
    silence = None if detector is None else detector.silent.get(backend.name)
    is_there = backend.health.state is not State.DOWN  # else its engine's figures are of one that is gone
    return {
        "name": backend.name,
        "method": backend.declared.method.value,
        "k": backend.declared.schedule.k,  # most tokens drafted per step; 0 for a baseline
        # The longest context that its drafter serves: `tokens`, and what happens `beyond`; None if it has no limit.
        "drafter_limit": backend.drafter_limit,
        "simulated": backend.simulated,
        "up": backend.health.state in SERVING,  # as `gateway_backend_up`
        "state": backend.health.state.value,
        "reason": backend.health.reason,
        # Why the policy ejected it, what is wrong with its drafter, and how it differs from the pool file, by its
        # engine's counters and by its answers; None if all is well.
        "outlier": None if detector is None else detector.reasons.get(backend.name),
        "silence": None if silence is None else str(silence),
        "contradiction": backend.contradiction if is_there else None,
        "difference": None if backend.difference is None else str(backend.difference),
        "trouble": "; ".join(map(str, served.troubles.at(backend))) or None,  # which requests fail there
        "in_flight": requests,  # of all gateway processes and other clients
        "engine": {"waiting": load.waiting, "kv_usage": load.kv_usage} if load.at_s and is_there else None,
        # From its engine's counters, over the last minute.
        "acceptance": watch.backend.engine.acceptance.at(time.monotonic()),
        "step_s": measured.step_s,
        # Expected by the policy's fit at the current load, without prefill.
        "fitted_step_s": None if replica is None else present_step_s(replica, requests),
        # Slowdown relative to its fit, as the policy infers from its last requests; 1 if there is none.
        "slowdown": None if learned is None else learned.detector.effect(backend.name, learned.clock())[0],
        "requests_per_s": measured.requests_per_s,
        "output_tokens_per_s": measured.output_tokens_per_s,
        "share": measured.requests_per_s / requests_per_s if requests_per_s else None,
        "failed": measured.failed,
        "ttft": measured.ttft,
        "tpot": measured.tpot,
        "point": point_of(watch, measured),
    }


def point_of(watch: Watch, measured: Measured) -> list[float | None]:
    """Return the values of a backend in the order of `SERIES`."""
    accepted = watch.backend.engine.acceptance.at(time.monotonic())
    ttft, tpot = measured.ttft_of_late, measured.tpot_of_late
    return [
        watch.backend.in_flight + watch.backend.load.others,
        measured.requests_per_s,
        measured.step_s,
        None if accepted is None else accepted.tokens_per_step,
        None if ttft is None else ttft["p95_s"],
        None if tpot is None else tpot["p95_s"],
    ]


def model_view(
    gateway: Gateway, name: str, backends: list[Document], belief: bytes | None, decisions: SampledDecisions | None
) -> Document:
    """Return the view of a model; `belief` is a `policies.learned.belief.Belief` as JSON."""
    served, queue = gateway.models[name], gateway.relay.queues.get(name)
    policy, guardrail = served.policy, served.guardrail
    versions = gateway.policy_versions.get(name)
    described = {} if versions is None else versions.describe()
    is_frozen = guardrail is not None and guardrail.frozen
    return {
        "name": name,
        "policy": policy.name,
        # The policy, `least_loaded` if it is frozen, or `rules, version 3`.
        "decides": "least_loaded" if is_frozen else described.get("decides", policy.name),
        "simulated": bool(backends) and all(backend["simulated"] for backend in backends),
        "waiting": 0 if queue is None else queue.waiting,  # in the queue of this gateway process
        "backends": backends,
        "unlike": list(unlike_answers(gateway.pool.of(name))),  # why answers differ by replica
        "gain": None if guardrail is None else _gain(guardrail),
        "belief": None if belief is None else orjson.Fragment(belief),
        "rules": {key: described[key] for key in ("versions", "pinned")}
        if isinstance(policy, Learned) and described
        else None,
        "decisions": [] if decisions is None else decisions.document(),
        "templates": {} if decisions is None else decisions.templates or {},  # first words, if texts may be shown
    }


def _gain(guardrail: Guardrail) -> Document:
    """Return the comparison with `least_loaded`, from blocks of time under each."""
    found = guardrail.comparison(CONFIDENCE)
    ratio, low, high = (None if math.isnan(number) else number for number in (found.ratio, found.low, found.high))
    return {
        "ratio": ratio,  # time per unit of work of the policy over that of `least_loaded`; None: too early to tell
        "low": low,
        "high": high,
        "confidence": CONFIDENCE,
        "share": guardrail.share(),  # of the time in which `least_loaded` decides; 0: no comparison
        "control_blocks": found.control,
        "needed_block_s": guardrail.needed_block_s(),  # None if blocks are long enough
        "frozen": guardrail.frozen,
    }
