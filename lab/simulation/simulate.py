"""Replay of a trace on simulated replicas in virtual time, with the policy in the loop."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from backends.calibration.load import load_calibration
from backends.calibration.parameters import EngineParameters
from backends.drafting.suffix import SuffixCache
from backends.speculation import Method
from lab.simulation.oracle import Oracle
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import ReplayRequest, under_load
from lab.simulation.sessions import LOOKAHEAD_S, Agenda, Order
from lab.statistics import Floats
from policies.drafter_limits import sparing, surviving
from policies.features.request import ANY_REQUEST, RequestFeatures
from policies.learned.shadow_drafting import ShadowSettings, shadow_arms, steps_of
from policies.policy import Decision, Outcome, Policy
from policies.roles import Learner, Maintained

if TYPE_CHECKING:  # importing it compiles code
    from backends.simulator.engine.replica import Completion, SimulatedReplica

MAINTENANCE_S = 0.5
"""Minimum interval between fits of a policy in virtual seconds, as in the gateway."""

MAINTENANCE_REQUESTS = 50
"""Least finished requests between fits: a fit takes milliseconds, but virtual time is free."""

MAINTENANCE_SHARE, MAX_MAINTENANCE_REQUESTS = 0.02, 1000
"""Least growth of the finished requests between fits, and the number of requests that always suffices."""

_QPS_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay: served requests after the warm-up, in order of the trace; arrays of shape (requests,)."""

    e2e_s: Floats
    ttft_s: Floats
    tpot_s: Floats  # seconds per output token after the first; NaN for a single token
    output_tokens: npt.NDArray[np.int64]
    backend: npt.NDArray[np.int64]  # index in the pool
    # Unserved requests after the warm-up: longer than their replica's context or KV cache, or in need of a baseline
    # that the pool lacks.
    errors: int
    duration_s: float  # seconds from the first arrival after the warm-up to the last end
    number: npt.NDArray[np.int64]  # index in the trace, ascending
    arrived_s: Floats  # seconds from the start of the replay

    def part(self, start: int, end: int) -> Replayed:
        """Return the results of the trace's requests from index `start` on, before `end`."""
        first, last = np.searchsorted(self.number, (start, end))
        own = {name: getattr(self, name)[first:last] for name in _COLUMNS}
        arrived_s = own["arrived_s"]
        return replace(
            self,
            **own,
            errors=max(0, end - start) - len(arrived_s),
            duration_s=float((arrived_s + own["e2e_s"]).max() - arrived_s.min()) if len(arrived_s) else 0.0,
        )


def replay(
    pool: Sequence[ReplicaSpec],
    requests: Sequence[ReplayRequest],
    policy: Policy | None,
    *,
    seed: int = 0,
    warmup: int = 0,
    remembers: bool = False,
    lookahead_s: float = LOOKAHEAD_S,
    sent_to: Sequence[int] = (),
) -> Replayed:
    """Replay a trace until all requests have finished; without a policy, `sent_to` or else an oracle chooses."""
    simulation = _Simulation(pool, requests, policy, seed, remembers=remembers, sent_to=sent_to)
    order = Order.of(requests)
    if order.is_open:
        for number, request in enumerate(requests):
            simulation.arrive(number, request, request.arrived_s)
            simulation.ends.clear()
        return simulation.finish(warmup)
    agenda = Agenda(order)
    now_s = agenda.next_s
    while True:
        for at_s, number in agenda.due(now_s):
            simulation.arrive(number, requests[number], at_s)
        if math.isinf(agenda.next_s) and not agenda.awaited:
            return simulation.finish(warmup)
        now_s = min(agenda.next_s, now_s + lookahead_s) if agenda.awaited else agenda.next_s
        simulation.advance(now_s)
        for number, at_s in simulation.ends:
            agenda.ended(number, at_s, now_s)
        simulation.ends.clear()


class _Simulation:
    """The state of a replay."""

    def __init__(
        self,
        pool: Sequence[ReplicaSpec],
        requests: Sequence[ReplayRequest],
        policy: Policy | None,
        seed: int,
        *,
        remembers: bool,
        sent_to: Sequence[int] = (),
    ) -> None:
        from backends.simulator.engine.fleet import Fleet, SimulatedReplica  # importing it compiles code

        self._pool = pool
        self._requests = requests
        self._replicas = []
        for spec in pool:
            calibration = load_calibration(spec.calibration)
            parameters = EngineParameters.of(
                calibration,
                spec.method,
                spec.config,
                max_model_len=spec.max_model_len,
                kv_blocks=spec.kv_blocks,
                drafter_limit=spec.drafter_limit,
                profile_context=spec.profile_context,
            )
            self._replicas.append(
                SimulatedReplica(
                    spec.name, calibration, spec.method, spec.config, parameters=parameters, weight=spec.weight
                )
            )
        self._fleet = Fleet(self._replicas, seed)
        self._trees = {
            number: SuffixCache(spec.config)
            for number, spec in enumerate(pool)
            if remembers and spec.method is Method.SUFFIX
        }
        self._baselines = [
            replica for replica, spec in zip(self._replicas, pool, strict=True) if spec.method is Method.BASELINE
        ]
        limits = [one.drafter_limit.tokens for one in self._replicas if one.drafter_limit is not None]
        self._least_limit = min(limits, default=math.inf)
        self._indices = {replica.name: index for index, replica in enumerate(self._replicas)}
        self._oracle = Oracle(pool, self._fleet, len(requests)) if policy is None and not sent_to else None
        self._sent_to = sent_to
        self._policy = policy
        self._now_s = requests[0].arrived_s if requests else 0.0
        if isinstance(policy, Maintained):
            policy.set_clock(lambda: self._now_s)
        _fit(policy)  # on statistics from an earlier replay
        self._next_maintenance_s = self._now_s
        self._finished = self._fitted = 0
        self._recent: deque[float] = deque()
        self._under_way: dict[int, tuple[int, ReplayRequest, RequestFeatures, Decision]] = {}
        self._observe = policy.observe if isinstance(policy, Learner) else None
        shadow = policy.shadow if isinstance(policy, Learner) else None
        self._shadow = None if shadow is None else SimulatedShadowDrafting(pool, shadow, seed)
        self._reads_requests = policy is not None and (policy.reads_requests or self._observe is not None)
        self._in_flight = 0
        self.ends: list[tuple[int, float]] = []  # number and end of ended requests; the caller empties it
        empty = [math.nan] * len(requests)
        self._arrived_s, self._e2e_s, self._ttft_s, self._tpot_s = (array("d", empty) for _ in range(4))
        self._output_tokens = array("q", bytes(8 * len(requests)))
        self._backend = array("q", [-1]) * len(requests)

    def advance(self, until_s: float) -> None:
        """Advance to a time."""
        self._complete(self._fleet.advance(until_s))
        self._now_s = until_s

    def arrive(self, number: int, request: ReplayRequest, at_s: float) -> None:
        """Advance to a request's arrival, and send it to the backend that the policy chooses."""
        self.advance(at_s)
        self._arrived_s[number] = at_s
        self._output_tokens[number] = request.output_tokens
        self._maintain()
        features = self._features(request) if self._reads_requests else ANY_REQUEST
        candidates: Sequence[SimulatedReplica] = self._baselines if request.features.baseline_only else self._replicas
        if not candidates:
            self.ends.append((number, at_s))
            return
        known = request.features
        if max(known.context_tokens, known.prompt_tokens + (known.max_tokens or 0)) > self._least_limit:
            candidates = surviving(request.features, candidates)
            if self._policy is not None and not self._policy.prices_limits:
                candidates = sparing(request.features, candidates)
        if self._policy is None:
            decision = _NO_DECISION
            replica = self._sent_to[number] if self._oracle is None else self._oracle.choose(request)
        else:
            decision = self._policy.choose(features, candidates)
            replica = self._indices[decision.backend]
        try:
            request_id = self._submit(replica, request)
        except ValueError:  # too long for the replica: vLLM returns 400
            if self._observe is not None:
                self._observe(_refused(features, decision, self._pool[replica].method))
            self.ends.append((number, at_s))
            return
        if self._oracle is not None:
            self._oracle.sent(replica, request_id)
        self._under_way[request_id] = number, request, features, decision
        self._in_flight += 1
        self._backend[number] = replica

    def finish(self, warmup: int) -> Replayed:
        """Simulate until all requests have finished."""
        self._complete(self._fleet.advance(math.inf))
        backend = np.frombuffer(self._backend, np.int64)
        served = backend >= 0
        arrived_s, e2e_s, ttft_s, tpot_s = (
            np.frombuffer(column)[served] for column in (self._arrived_s, self._e2e_s, self._ttft_s, self._tpot_s)
        )
        return Replayed(
            number=np.flatnonzero(served),
            arrived_s=arrived_s,
            e2e_s=e2e_s,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            output_tokens=np.frombuffer(self._output_tokens, np.int64)[served],
            backend=backend[served],
            errors=0,
            duration_s=0.0,
        ).part(warmup, len(backend))

    def _features(self, request: ReplayRequest) -> RequestFeatures:
        """Return the features of a request with the load on arrival."""
        while self._recent and self._recent[0] < self._now_s - _QPS_WINDOW_S:
            self._recent.popleft()
        self._recent.append(self._now_s)
        return under_load(request.features, len(self._recent) / _QPS_WINDOW_S, self._in_flight)

    def _submit(self, replica: int, request: ReplayRequest) -> int:
        one, tree, script = self._pool[replica], self._trees.get(replica), None
        kind, temperature = request.features.workload or "chat", request.features.temperature
        if tree is not None:
            script = request.warm_script(tree)
        if script is None and one.method is not Method.BASELINE:  # every step of a baseline emits one token
            script = request.script(one.method, self._replicas[replica].parameters.k, one.config)
        if script is not None:
            return self._fleet.submit_script(replica, script, self._now_s, kind=kind, temperature=temperature)
        return self._fleet.submit(
            replica,
            request.prompt_tokens,
            request.output_tokens,
            self._now_s,
            kind=kind,
            temperature=temperature,
            prefix_blocks=request.prefix_blocks,
        )

    def _complete(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            number, request, features, decision = self._under_way.pop(completion.request_id)
            later = completion.output_tokens - 1
            self.ends.append((number, completion.ended_s))
            self._e2e_s[number], self._ttft_s[number] = completion.e2e_s, completion.ttft_s
            if later:
                self._tpot_s[number] = (completion.ended_s - completion.first_s) / later
            tree = self._trees.get(completion.replica)
            if tree is not None:
                request.warm_script(tree, learn=True)
            self._finished += 1
            self._in_flight -= 1
            if self._observe is not None:
                outcome = outcome_of(features, decision, completion, self._pool[completion.replica].method)
                if self._shadow is not None and (shadow := self._shadow.of(request)):
                    outcome = replace(outcome, shadow=shadow)
                self._observe(outcome)

    def _maintain(self) -> None:
        more = max(MAINTENANCE_REQUESTS, min(MAX_MAINTENANCE_REQUESTS, MAINTENANCE_SHARE * self._fitted))
        enough = self._finished >= self._fitted + more or not self._finished
        due = self._now_s >= self._next_maintenance_s and enough
        if due:
            _fit(self._policy)
            self._next_maintenance_s, self._fitted = self._now_s + MAINTENANCE_S, self._finished


class SimulatedShadowDrafting:
    """Replays n-gram and suffix drafting on finished texts, as the gateway's shadow drafting does."""

    def __init__(self, pool: Sequence[ReplicaSpec], settings: ShadowSettings, seed: int) -> None:
        self._sample = settings.sample
        self._arms = shadow_arms((one.method, one.config.get("num_speculative_tokens", 0), one.config) for one in pool)
        self._rng = Random(seed)

    def of(self, request: ReplayRequest) -> dict[str, float]:
        """Return tokens per step by arm for a request; empty if its text is unknown or it is not sampled."""
        tokens_per_step: dict[str, float] = {}
        if request.text is None or not request.text.exact or self._rng.random() >= self._sample:
            return tokens_per_step
        for arm in self._arms:
            script = request.script(arm.method, arm.k, arm.config)
            if script is not None and (steps := steps_of(script.emitted)) > 1:
                tokens_per_step[arm.arm] = (request.output_tokens - 1) / (steps - 1)
        return tokens_per_step


def _fit(policy: Policy | None) -> None:
    if isinstance(policy, Maintained) and (work := policy.maintenance()) is not None:
        work()


def outcome_of(features: RequestFeatures, decision: Decision, completion: Completion, method: Method) -> Outcome:
    """Return a finished simulated request's outcome, for the policy to observe."""
    later = completion.output_tokens - 1
    return Outcome(
        request=features,
        decision=decision,
        method=method,
        status=200,
        ttft_s=completion.ttft_s,
        tpot_s=(completion.ended_s - completion.first_s) / later if later else None,
        e2e_s=completion.e2e_s,
        prompt_tokens=completion.prompt_tokens,
        output_tokens=completion.output_tokens,
        tokens_per_step=completion.tokens_per_step,
        drafted_tokens=completion.drafted,
        accepted_tokens=completion.accepted,
        cached_tokens=completion.cached_tokens,
    )


def _refused(features: RequestFeatures, decision: Decision, method: Method) -> Outcome:
    """Return the outcome of a request that was too long, so that the policy no longer counts it as in flight."""
    return Outcome(features, decision, method, 400, None, None, 0.0, features.prompt_tokens, 0, None)


def slo_kept(played: Replayed, slo: Mapping[str, float]) -> npt.NDArray[np.bool_]:
    """Return whether each request kept all bounds of `ttft`, `tpot` and `e2e` in seconds, shape (requests,)."""
    good = np.ones(len(played.e2e_s), np.bool_)
    for name, values in (("ttft", played.ttft_s), ("tpot", played.tpot_s), ("e2e", played.e2e_s)):
        if name in slo:
            good &= ~(values > slo[name])
    return good


_NO_DECISION = Decision("", "", "")
_COLUMNS = ("e2e_s", "ttft_s", "tpot_s", "output_tokens", "backend", "number", "arrived_s")
