"""Days that are replayed on replicas which come and go."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from backends.speculation import Method
from benchmarks.fleet.traffic import Traffic
from gateway.rooms.fleet.demand import Minute
from gateway.rooms.fleet.model import Judged
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import ReplayRequest
from lab.simulation.sessions import LOOKAHEAD_S, Agenda, Order
from lab.simulation.simulate import _Simulation, slo_kept
from policies.build import build
from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings

MOST = 8
"""Replicas that are wanted at most at a time."""
START_UP_S = 180.0
METHODS = {"eagle3": {"num_speculative_tokens": 3}, "suffix": {"num_speculative_tokens": 16}}


class Days(_Simulation):
    """A replay in which replicas come and go each minute."""

    def __init__(self, traffic: Traffic, requests: Sequence[ReplayRequest]) -> None:
        specs = [
            ReplicaSpec(f"{method}-{number}", Method(method), config, traffic.calibration)
            for method, config in METHODS.items()
            for number in range(MOST)
        ]
        slo = {"tpot_ms": 1e3 * traffic.tpot_s, "ttft_ms": 1e3 * traffic.ttft_s}
        settings = LearnedSettings.model_validate({"slo": slo, "calibration": traffic.calibration, "seed": 0})
        policy = build("learned", settings)
        super().__init__(specs, requests, policy, 0, remembers=False)
        assert isinstance(policy, Learned)
        self.policy = policy
        self.all = list(self._replicas)
        self.traffic = traffic
        self.since = {f"{method}-{number}": -math.inf for method in METHODS for number in range(MOST // 2)}
        self.leaving: set[str] = set()
        self.minutes: list[Minute] = []
        self.judged: dict[str, Judged] = {}  # within the last minute, by method
        self._agenda = Agenda(Order.of(requests))
        self._now_s = 0.0
        self._look()

    def minute(self) -> None:
        """Play a minute, and see who has come up or has ended."""
        until_s, tokens, judged = 60.0 * (len(self.minutes) + 1), [0, 0, 0], dict[str, Judged]()
        while self._now_s < until_s:
            for at_s, number in self._agenda.due(self._now_s):
                one = self._requests[number]
                self._replicas = [each for _, each in self.up]
                self.arrive(number, one, at_s)
                tokens = [tokens[0] + 1, tokens[1] + one.prompt_tokens, tokens[2] + one.output_tokens]
            sooner_s = self._now_s + LOOKAHEAD_S if self._agenda.awaited else math.inf
            self.advance(min(until_s, self._agenda.next_s, sooner_s))
            for number, at_s in self.ends:
                method = self._pool[self._backend[number]].method.value
                is_late = self._ttft_s[number] > self.traffic.ttft_s or self._tpot_s[number] > self.traffic.tpot_s
                kept, missed = judged.get(method, (0.0, 0.0))
                judged[method] = Judged(kept + (not is_late), missed + is_late)
                self._agenda.ended(number, at_s, self._now_s)
            self.ends.clear()
        self.minutes.append(Minute(tokens[0], tokens[1], tokens[2], tokens[2]))
        self.judged = judged
        for each in self.all:
            if each.name in self.leaving and not each.in_flight:
                self.leaving.discard(each.name)
                del self.since[each.name]
        self._look()

    def _look(self) -> None:
        up = {name for name, since_s in self.since.items() if since_s <= self._now_s} - self.leaving
        self.up = [(each.method.value, each) for each in self.all if each.name in up]

    def _submit(self, replica: int, request: ReplayRequest) -> int:
        self._replicas = self.all
        return super()._submit(replica, request)

    def cached(self) -> float:
        """Return the share of prompt tokens that the prefix caches had."""
        counters = [self._fleet.counters(number) for number in range(len(self.all))]
        return sum(each.prefix_hits for each in counters) / max(1, sum(each.prefix_queries for each in counters))

    def set(self, wanted: Counter[str]) -> None:
        """Begin replicas, or take them away."""
        for method in METHODS:
            mine = [name for name in self.since if name.startswith(method) and name not in self.leaving]
            for name in sorted(mine, key=lambda name: -self.since[name])[: max(0, len(mine) - wanted[method])]:
                self.leaving.add(name)
            free = [each.name for each in self.all if each.name.startswith(method) and each.name not in self.since]
            for name in free[: max(0, wanted[method] - len(mine))]:
                self.since[name] = self._now_s + START_UP_S


Scaler = Callable[[Days], Counter[str]]


def play(traffic: Traffic, requests: Sequence[ReplayRequest], hours: float, scale: Scaler) -> str:
    """Return, as cells, the share of the second day's requests within the targets, and its replicas by method."""
    days, day = Days(traffic, requests), round(hours * 60)
    paid, hours_up = 0, {quarter: Counter[str]() for quarter in range(4)}
    for minute in range(2 * day):
        days.minute()
        days.set(scale(days))
        if minute >= day:
            paid += len(days.since)
            hours_up[4 * (minute - day) // day].update(method for method, _ in days.up)
    result = days.finish(0)
    judged = result.arrived_s >= 60.0 * day
    good = slo_kept(result, {"ttft": traffic.ttft_s, "tpot": traffic.tpot_s})
    share = float(good[judged].sum() / (judged.sum() + result.errors))
    night, noon = (
        ", ".join(f"{4.0 * hours_up[quarter][method] / day:.1f} {method}" for method in METHODS) for quarter in (0, 2)
    )
    return f"{share:.1%} | {paid / day:.2f} | {night} | {noon}"
