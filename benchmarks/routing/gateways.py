"""Several gateways before one pool: each sends a share of the requests, and hears of the others' as gateways do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Final, cast

from backends.backend import Candidate, EngineChange
from backends.simulator.engine.replica import SimulatedReplica
from policies.features.request import RequestFeatures
from policies.policy import Decision, Outcome, Policy, PolicySettings
from policies.roles import Informed, Learner, Maintained, Work

START_S: Final = 120.0
"""Seconds until an engine that restarts serves again."""


class Gateways(Policy, Learner, Maintained):
    """The policies of gateways, one each, that tell each other at once where they have sent a prompt.

    Parameters
    ----------
    events
        Whether they hear what the engines evict.
    restart_every
        Requests after which one replica is drained, restarts and comes back with an empty cache, then the next;
        0: none.
    """

    def __init__(self, members: Sequence[Policy], seed: int, *, events: bool, restart_every: int) -> None:
        super().__init__(PolicySettings())
        self.name = members[0].name
        self._members, self._events, self._restart_every = members, events, restart_every
        self._rng = Random(seed)
        self._clock: Callable[[], float] = lambda: 0.0
        self._sent_by: dict[int, tuple[Decision, Policy, float]] = {}  # with the time
        self._requests = 0
        self._leaving = ""  # the replica that is drained
        self._back_s: dict[str, float] = {}  # when a replica that restarts is back

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Replace the clock of all of them."""
        self._clock = clock
        for each in self._members:
            if isinstance(each, Maintained):
                each.set_clock(clock)

    def maintenance(self) -> Work:
        """Return the work that is due."""
        works = [each.maintenance() for each in self._members if isinstance(each, Maintained)]

        return lambda *pause: [one(*pause) for one in works if one is not None]

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose by one of them."""
        replicas = cast("Sequence[SimulatedReplica]", candidates)
        present = self._present(replicas) if self._restart_every else replicas
        member = self._rng.choice(self._members)
        if self._events:
            self._report_evictions(replicas)
        decision = member.choose(request, present)
        self._sent_by[id(decision)] = decision, member, self._clock()
        self._tell_others(member, decision.backend, request)
        return decision

    def observe(self, outcome: Outcome) -> None:
        """Pass an outcome to the one that has chosen."""
        decision, member, _ = self._sent_by.pop(id(outcome.decision))
        if isinstance(member, Learner):
            member.observe(outcome)
        if self._events:
            self._tell_others(member, decision.backend, outcome.request)

    def _tell_others(self, member: Policy, backend: str, request: RequestFeatures) -> None:
        for other in self._members:
            if other is not member and isinstance(other, Informed):
                other.sent_elsewhere(backend, request.prefix, request.prefix_tokens)

    def _report_evictions(self, replicas: Sequence[SimulatedReplica]) -> None:
        now_s, oldest_s = self._clock(), dict[str, float]()
        for decision, _, sent_s in self._sent_by.values():
            oldest_s[decision.backend] = min(sent_s, oldest_s.get(decision.backend, sent_s))
        for replica in replicas:
            until_s = min(replica.evicted_s, oldest_s.get(replica.name, now_s))  # what runs is not evicted
            for member in self._members:
                if isinstance(member, Informed):
                    member.evicted(replica.name, now_s - until_s, is_full=replica.is_full)

    def _present(self, replicas: Sequence[SimulatedReplica]) -> Sequence[SimulatedReplica]:
        """Return the replicas that are neither drained nor restarting."""
        self._requests += 1
        if not self._requests % self._restart_every:
            self._leaving = replicas[self._requests // self._restart_every % len(replicas)].name
        now_s = self._clock()
        for replica in replicas:
            if replica.name == self._leaving and not replica.in_flight:
                self._leaving = ""
                self._back_s[replica.name] = now_s + START_S
                replica.restart()
                for member in self._members:
                    if isinstance(member, Informed):
                        member.engine_changed(replica.name, EngineChange.RESTART)
        return [each for each in replicas if each.name != self._leaving and self._back_s.get(each.name, now_s) <= now_s]
