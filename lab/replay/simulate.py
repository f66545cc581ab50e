"""A trace played on simulated replicas in virtual time, with the policy in the loop: it meets what it causes."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from backends.calibration.calibration import load_calibration
from backends.calibration.parameters import EngineParameters
from backends.speculation import Method
from lab.replay.oracle import Oracle
from lab.replay.request import ReplayRequest, under_load
from policies.features.request import RequestFeatures
from policies.learned.shadow_drafting import shadow_arms, steps_of
from policies.policy import Decision, Outcome, Policy
from policies.statistics import Row

if TYPE_CHECKING:  # a fleet is compiled; who only names its types need not load a compiler
    from backends.simulator.engine.replica import Completion

Floats = npt.NDArray[np.float64]

UPKEEP_S = 0.5
"""How often a policy may fit what it observed, in virtual seconds; as the gateway does."""

UPKEEP_REQUESTS = 50
"""At how many finished requests at least it does so here: a fit takes milliseconds, and a virtual second nothing."""

UPKEEP_SHARE, UPKEEP_MOST_REQUESTS = 0.02, 1000
"""What it has seen grows by that share at least from one fit to the next, but never by more than so many requests."""

_QPS_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One simulated replica of the pool.

    Parameters
    ----------
    max_model_len, kv_blocks
        In place of the calibration's: the longest request in tokens, and the blocks of its KV cache.
    """

    name: str
    method: Method
    config: Mapping[str, Any]
    calibration: str
    weight: float = 1.0
    max_model_len: int | None = None
    kv_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of the requests that count, in order of arrival; shape (requests,) each.

    Parameters
    ----------
    tpot_s
        NaN for a single token.
    backend
        Position in the pool.
    errors
        Requests that count but were not served: longer than their replica's context or KV cache, or for a baseline
        where the pool has none.
    duration_s
        From the first arrival that counts to the last end.
    """

    e2e_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    output_tokens: npt.NDArray[np.int64]
    backend: npt.NDArray[np.int64]
    errors: int
    duration_s: float


def replay(
    pool: Sequence[ReplicaSpec],
    requests: Sequence[ReplayRequest],
    policy: Policy | None,
    *,
    seed: int = 0,
    warmup: int = 0,
    progress: Callable[[], None] | None = None,
) -> Replayed:
    """Play a trace until all requests have finished.

    Parameters
    ----------
    requests
        In order of arrival.
    policy
        Fresh, or with what it learned before; None for the oracle one, which knows lengths and acceptance.
    seed
        Of what must be drawn; the same for every policy gives every request the same luck.
    warmup
        Requests at the beginning that are played but do not count.
    progress
        Called once a request.

    Raises
    ------
    ValueError
        If a replica cannot be simulated.
    """
    playing = _Playing(pool, requests, policy, seed)
    for number, request in enumerate(requests):
        playing.arrive(number, request)
        if progress is not None:
            progress()
    return playing.finish(warmup)


class _Playing:
    """A replay under way."""

    def __init__(
        self, pool: Sequence[ReplicaSpec], requests: Sequence[ReplayRequest], policy: Policy | None, seed: int
    ) -> None:
        from backends.simulator.engine.fleet import Fleet, Replica  # compiled: only whoever plays need load it

        self._pool = pool
        self._requests = requests
        self._replicas = []
        for one in pool:
            known = load_calibration(one.calibration)
            parameters = EngineParameters.of(known, one.method, one.config, max_model_len=one.max_model_len)
            if one.kv_blocks is not None:
                parameters = replace(parameters, kv_blocks=one.kv_blocks)
            self._replicas.append(
                Replica(one.name, known, one.method, one.config, parameters=parameters, weight=one.weight)
            )
        self._fleet = Fleet(self._replicas, seed)
        self._plain = [one for one, of in zip(self._replicas, pool, strict=True) if of.method is Method.BASELINE]
        self._places = {replica.name: place for place, replica in enumerate(self._replicas)}
        self._clairvoyant = Oracle(pool, self._fleet) if policy is None else None
        self._policy = policy
        self._shadow = TextLookups(pool, policy, seed) if policy is not None and policy.shadow is not None else None
        self._now_s = requests[0].arrived_s if requests else 0.0
        if policy is not None:
            policy.set_clock(lambda: self._now_s)
            _fit(policy)  # what it was given before it began
        self._next_upkeep_s = self._now_s
        self._finished = self._fitted = 0
        self._recent: deque[float] = deque()
        self._under_way: dict[int, tuple[int, ReplayRequest, RequestFeatures, Decision]] = {}
        self._learns = policy is not None and type(policy).observe is not Policy.observe
        self._in_flight = 0
        empty = [math.nan] * len(requests)
        self._arrived_s, self._e2e_s, self._ttft_s, self._tpot_s = (array("d", empty) for _ in range(4))
        self._output_tokens = array("q", bytes(8 * len(requests)))
        self._backend = array("q", [-1]) * len(requests)

    def arrive(self, number: int, request: ReplayRequest) -> None:
        """Advance to a request, and send it where the policy says."""
        self._note(self._fleet.advance(request.arrived_s))
        self._now_s = self._arrived_s[number] = request.arrived_s
        self._output_tokens[number] = request.output_tokens
        self._keep_up()
        features = self._met(request)
        candidates = self._plain if features.baseline_only else self._replicas
        if not candidates:
            return
        steps = 0
        if self._policy is None:
            assert self._clairvoyant is not None
            decision = _CLAIRVOYANT
            place, steps = self._clairvoyant.choose(request, [self._places[one.name] for one in candidates])
        else:
            decision = self._policy.choose(features, candidates)
            place = self._places[decision.backend]
        try:
            identity = self._submit(place, request)
        except ValueError:  # too long for the replica: vLLM answers 400
            if self._policy is not None:
                self._policy.observe(_refused(features, decision, self._pool[place].method))
            return
        if self._clairvoyant is not None:
            self._clairvoyant.sent(place, identity, request, steps)
        self._under_way[identity] = number, request, features, decision
        self._in_flight += 1
        self._backend[number] = place

    def finish(self, warmup: int) -> Replayed:
        """Play until all requests have finished."""
        self._note(self._fleet.advance(math.inf))
        backend = np.frombuffer(self._backend, np.int64)
        after_warmup = np.arange(len(backend)) >= warmup
        counted = after_warmup & (backend >= 0)
        arrived_s, e2e_s, ttft_s, tpot_s = (
            np.frombuffer(column)[counted] for column in (self._arrived_s, self._e2e_s, self._ttft_s, self._tpot_s)
        )
        return Replayed(
            e2e_s=e2e_s,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            output_tokens=np.frombuffer(self._output_tokens, np.int64)[counted],
            backend=backend[counted],
            errors=int((after_warmup & (backend < 0)).sum()),
            duration_s=float((arrived_s + e2e_s).max() - arrived_s.min()) if len(arrived_s) else 0.0,
        )

    def _met(self, request: ReplayRequest) -> RequestFeatures:
        """Return the features of a request, with the load that it meets."""
        while self._recent and self._recent[0] < self._now_s - _QPS_WINDOW_S:
            self._recent.popleft()
        self._recent.append(self._now_s)
        return under_load(request.features, len(self._recent) / _QPS_WINDOW_S, self._in_flight)

    def _submit(self, place: int, request: ReplayRequest) -> int:
        one = self._pool[place]
        if one.method is not Method.BASELINE:  # whose steps are of one token, drawn or not
            script = request.script(one.method, self._replicas[place].parameters.k, one.config)
            if script is not None:
                return self._fleet.submit_script(place, script, self._now_s)
        return self._fleet.submit(
            place,
            request.prompt_tokens,
            request.output_tokens,
            self._now_s,
            kind=request.features.workload or "chat",
            temperature=request.features.temperature,
            prefix_blocks=request.prefix_blocks,
        )

    def _note(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            number, request, features, decision = self._under_way.pop(completion.request_id)
            later = completion.output_tokens - 1
            self._e2e_s[number], self._ttft_s[number] = completion.e2e_s, completion.ttft_s
            if later:
                self._tpot_s[number] = (completion.ended_s - completion.first_s) / later
            self._finished += 1
            self._in_flight -= 1
            if self._clairvoyant is not None:
                self._clairvoyant.end(completion.replica, completion.request_id)
            elif self._learns:
                assert self._policy is not None
                outcome = outcome_of(features, decision, completion, self._pool[completion.replica].method)
                if self._shadow is not None:
                    outcome = replace(outcome, shadow=self._shadow.of(request))
                self._policy.observe(outcome)

    def _keep_up(self) -> None:
        more = max(UPKEEP_REQUESTS, min(UPKEEP_MOST_REQUESTS, UPKEEP_SHARE * self._fitted))
        enough = self._finished >= self._fitted + more or not self._finished
        due = self._now_s >= self._next_upkeep_s and enough
        if due and self._policy is not None:
            _fit(self._policy)
            self._next_upkeep_s, self._fitted = self._now_s + UPKEEP_S, self._finished


class TextLookups:
    """Tells of each text what lookups would have given, as a gateway finds out beside its requests."""

    def __init__(self, pool: Sequence[ReplicaSpec], policy: Policy, seed: int) -> None:
        assert policy.shadow is not None
        self._sample = policy.shadow.sample
        self._arms = shadow_arms((one.method, one.config.get("num_speculative_tokens", 0), one.config) for one in pool)
        self._rng = Random(seed)

    def of(self, request: ReplayRequest) -> dict[str, float]:
        """Return tokens per step by arm, for a request whose text is known."""
        found: dict[str, float] = {}
        if request.text is None or not request.text.exact or self._rng.random() >= self._sample:
            return found
        for arm in self._arms:
            script = request.script(arm.method, arm.k, arm.config)
            if script is not None and (steps := steps_of(script.emitted)) > 1:
                found[arm.arm] = (request.output_tokens - 1) / (steps - 1)
        return found


def _fit(policy: Policy) -> None:
    if (work := policy.maintenance()) is not None:
        work()


def outcome_of(features: RequestFeatures, decision: Decision, completion: Completion, method: Method) -> Outcome:
    """Return what a policy is told of a simulated request that has ended."""
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
    """Return what a policy is told of a request that was too long: it is no longer under way."""
    return Outcome(features, decision, method, 400, None, None, 0.0, features.prompt_tokens, 0, None)


def slo_kept(played: Replayed, slo: Mapping[str, float]) -> npt.NDArray[np.bool_]:
    """Tell of each request whether it kept all bounds of `ttft`, `tpot` and `e2e`, in seconds; shape (requests,)."""
    good = np.ones(len(played.e2e_s), np.bool_)
    for name, values in (("ttft", played.ttft_s), ("tpot", played.tpot_s), ("e2e", played.e2e_s)):
        if name in slo:
            good &= ~(values > slo[name])
    return good


def learned_rows(policy: Policy) -> list[Row]:
    """Return all that a policy has observed, to be kept in a file; nothing for one that learns nothing."""
    statistics = policy.statistics
    if statistics is None:
        return []
    return [
        Row(table.name, 0, key, sums)
        for table in statistics.tables.values()
        for key, sums in statistics.buckets(table).items()
    ]


def set_learned(policy: Policy, rows: Sequence[Row], now_s: float) -> None:
    """Give a policy what was observed before, as if it had been just now."""
    statistics = policy.statistics
    if statistics is None:
        return
    policy.set_clock(lambda: now_s)
    epochs = {table.name: int(now_s // table.epoch_s) for table in statistics.tables.values()}
    statistics.set_others(row._replace(epoch=epochs[row.table]) for row in rows if row.table in epochs)


_CLAIRVOYANT = Decision("", "oracle", "least_delay")
