"""What is known about a pool: the table, the replicas, their caches and the findings about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from backends.backend import Candidate
from policies.features.request import TYPICAL_TOKENS, RequestFeatures
from policies.learned.cost import Ask, Delay, coming, crowd_of
from policies.learned.detector import Detector
from policies.learned.prefix_memory import PrefixMemory
from policies.learned.prior import attention_share, known_to_tokens, text_of
from policies.learned.replica import STEPS, KnownReplica, fit_factors, mean_logs, possible
from policies.learned.shadow_drafting import ShadowBias
from policies.learned.table import LENGTH, PER_STEP, Groups, Kinds, Means, RequestKind, Shares, mean_of
from policies.statistics import Statistics


class Drafted:
    """The lesson of an answer on tokens per step: by how much their logarithm exceeds the expectation."""

    __slots__ = ("excess", "groups", "share", "weight")

    def __init__(self, groups: Groups, excess: float, weight: float, share: float) -> None:
        self.groups, self.excess = groups, excess
        self.weight = weight  # lower for an answer with few drafts
        self.share = share  # weight of its client, see `Shares`


class Known:
    """What a policy knows about a pool."""

    def __init__(self, calibration: str, statistics: Statistics) -> None:
        self.calibration, self.attention = calibration, attention_share(calibration)
        self.statistics = statistics
        self.per_step = Means(PER_STEP, statistics, _MOST_EXCESS)
        self.lengths = Means(LENGTH, statistics, _MOST_LENGTH)
        self.kinds, self.shares = Kinds(), Shares()
        self.replicas: dict[str, KnownReplica] = {}
        self._of_arm: dict[str, int] = {}  # replicas by arm
        self.prefixes = PrefixMemory()
        self.detector: Detector[Drafted] = Detector()
        self.shadow_bias = ShadowBias()
        self.corrections: dict[str, float] = {}  # factors on tokens per step that answers show, by replica
        self._mean_prefill_s = 0.0
        self._usual = (1.0, 1.0, 1.0, 1.0)

    def delays(
        self,
        request: RequestFeatures,
        candidates: Sequence[Candidate],
        kind: RequestKind,
        now_s: float,
        oldest_s: float,
    ) -> list[Delay]:
        """Return the delay of a request on each candidate, without side effects."""
        tokens = self.tokens(request, kind.lengths)
        context = request.prompt_tokens + tokens / 2
        stretch, coming_per_s = coming(request.qps / len(candidates), self._mean_prefill_s)
        holders = self.prefixes.holders(request)
        ask = Ask(tokens, context, holders, self.attention, stretch, coming_per_s, crowd_of(candidates))
        text = text_of(request.workload, request.temperature, context)
        replicas, around, found = self.replicas, self.per_step.around(kind.groups), self.detector.found
        of_arm: dict[str, tuple[tuple[float, ...], float]] = {}
        delays = []
        for candidate in candidates:
            replica = replicas.get(candidate.name) or self.replica(candidate)
            if (load := candidate.load) is not replica.load:  # a new report is a new object
                replica.read(candidate)
            requests, waiting = candidate.in_flight, 0
            if load.at_s >= oldest_s:
                requests += replica.others
                if replica.waiting > 1 + _QUEUE * load.running:
                    waiting = max(0, requests - load.running)  # a full engine does not run more
            by_k: tuple[float, ...] = _PLAIN
            excess = 0.0
            if replica.k:
                known = of_arm.get(replica.arm)
                if known is None:
                    known = replica.expected(text), mean_of(replica.arm, around)
                    of_arm[replica.arm] = known
                by_k, excess = known
                excess += replica.apart
            effect = self.detector.effect(replica.name, now_s) if found else (1.0, 1.0)
            delays.append(Delay(replica, request, ask, by_k, excess, effect, requests, waiting, now_s))
        return delays

    def note(self, candidate: Candidate, delay: Delay) -> str:
        """Return in words the delay of a request on a candidate, and its basis."""
        note = (
            f"first token {delay.ttft_s:.3f} s, the rest {delay.decode_s:.3f} s "
            f"({delay.tokens:.0f} tokens, {delay.per_step:.2f} per step of "
            f"{1e3 * delay.step_s:.1f} ms), others delayed by {delay.others_s:.3f} s"
        )
        if cached := int(delay.cached_tokens):
            note += f"; {cached:,} tokens of the prompt cached, by {delay.replica.prefixes.goes_by}"
        known = known_to_tokens(self.calibration, candidate.method)
        if delay.context_tokens > known:
            note += f"; its acceptance is published for up to {known:,.0f} tokens of context"
        return "; ".join([note, *map(str, self.detector.found.get(candidate.name, ()))])

    def learn_drafts(self, replica: KnownReplica, one: Drafted, now_s: float) -> None:
        """Learn the tokens per step of an answer: for its arm, and the deviation of its replica."""
        means, weight, own = self.per_step, one.weight * one.share, one.weight
        rest = one.excess - mean_of(replica.arm, means.around(one.groups))
        means.add(replica.arm, one.groups, one.excess - replica.apart, weight, own, now_s)
        if self._of_arm.get(replica.arm, 0) > 1:
            means.add(replica.own, _ALL, rest, _APART * weight, _APART * own, now_s)
            replica.apart = means.mean(replica.own, _ALL)

    def tokens(self, request: RequestFeatures, lengths: Groups) -> float:
        """Return the expected tokens of each sequence of the answer."""
        tokens, limit = TYPICAL_TOKENS * math.exp(mean_of("", self.lengths.around(lengths))), request.max_tokens
        return max(1.0, tokens if limit is None or tokens < limit else float(limit))

    def send(
        self,
        request: RequestFeatures,
        kind: RequestKind,
        delay: Delay,
        delays: list[Delay],
        now_s: float,
        *,
        is_compared: bool,
    ) -> None:
        """Add a request to the work of a replica."""
        for one in delays:
            one.replica.update(now_s, one.requests)
        self.kinds.see(request.template)
        delay.begin(kind, now_s, is_compared=is_compared)
        delay.replica.send(delay, now_s)
        delay.replica.prefixes.remember(request.prefix, request.prefix_tokens, now_s)
        self._mean_prefill_s += _NEW * (delay.prefill_s - self._mean_prefill_s)

    def forget(self, backend: str) -> None:
        """Drop what is known about a backend that has left; the statistics stay, and age."""
        self.corrections.pop(backend, None)
        self.detector.forget(backend)
        if (replica := self.replicas.pop(backend, None)) is not None:
            self._of_arm[replica.arm] -= 1
            self._read_apart()
            self.prefixes.remove_backend(replica.prefixes)

    def is_slow(self, backend: str) -> bool:
        """Return whether a backend's steps are clearly slower, for its method, than is usual among the others."""
        logs = mean_logs(possible(self.statistics.buckets(STEPS)))
        own = logs.pop(backend, -math.inf)
        return bool(logs) and own > _SLOWER + median(logs.values())

    def correct(self, backend: str, factor: float) -> None:
        """Multiply the tokens per step of a backend's answers by a factor; drop what was learned from them before."""
        replica = self.replicas.get(backend)
        if backend not in self.corrections and factor != 1.0:
            if replica is not None:
                self.statistics.drop(PER_STEP, lambda key: key[0] in {replica.arm, replica.own})
            self.statistics.drop(STEPS, lambda key: key[0] == backend)
        self.corrections[backend] = factor
        if factor == 1.0:
            del self.corrections[backend]

    def fit(self, now_s: float) -> Callable[..., None]:
        """Return work for another thread: fit step times, and read what other gateways have reported since."""
        due = [one for one in (self.per_step, self.lengths) if one.is_due(now_s)]

        def work(pause: Callable[[], object] = lambda: None, /) -> None:
            for means in due:
                means.take(means.read())
                pause()
            factors = fit_factors(self.statistics.buckets(STEPS))
            self._usual = factors[""][0]
            for name, replica in [*self.replicas.items()]:
                replica.learn(*factors.get(name, (self._usual, 0.0)))
            self._read_apart()

        return work

    def replica(self, candidate: Candidate) -> KnownReplica:
        """Return what is known about a replica; a new one starts with the calibration, and the pool's speed."""
        replica = self.replicas.get(candidate.name)
        if replica is None:
            replica = self.replicas[candidate.name] = KnownReplica(
                candidate, self.calibration, self.prefixes.add_backend()
            )
            replica.learn(self._usual, 0.0)
            self._of_arm[replica.arm] = self._of_arm.get(replica.arm, 0) + 1
            self._read_apart()
        return replica

    def _read_apart(self) -> None:
        """Set by how much each replica's log(tokens per step) exceeds that of others of its arm."""
        for replica in [*self.replicas.values()]:
            several = self._of_arm.get(replica.arm, 0) > 1
            replica.apart = self.per_step.mean(replica.own, _ALL) if several else 0.0


_PLAIN: Final[tuple[float, ...]] = (0.0,)
_ALL: Final = ((),)
_APART: Final = 0.25
"""Weight of an answer in a replica's deviation from its arm: replicas of one arm rarely differ."""
_NEW: Final = 0.01
_SLOWER: Final = math.log(1.1)
_QUEUE: Final = 0.25
"""Waiting requests, relative to the running ones, beyond which they wait for more than the end of a step."""
_MOST_EXCESS: Final = 3.0
_MOST_LENGTH: Final = 9.0
"""Bounds on the means that other gateways may report, as logarithms."""
