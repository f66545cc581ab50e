"""Compare how fleets follow days of traffic: `python -m benchmarks.fleet [--hours H] [--start-up S] [--peak R]`.

Two days of chat, code and summaries, each with its own hours, are replayed in virtual time on replicas of Llama-3.1-70B
on four H100, of which at most eight are wanted at a time. Days are shortened to H hours and start-ups are not, so that
traffic swings more steeply. A replica that is begun is paid at once and serves S seconds later; one that is taken away
gets nothing new, and is paid until its last answer has ended. The second day is judged. `learned` routes for all.
`queue` is Kubernetes' rule on requests in flight for each replica, with EAGLE-3 alone, at several targets.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from backends.speculation import Method
from gateway.fleet.demand import Minute
from gateway.fleet.room import ModelFleet
from lab.replay.request import ReplayRequest, replay_request
from lab.replay.simulate import ReplicaSpec, _Simulation
from lab.trace.record import TraceRecord
from policies.build import build
from policies.learned.policy import Learned, LearnedSettings

MOST = 8
TTFT_S, TPOT_S = 2.0, 0.025
CALIBRATION = "llama-3.1-70b-4xh100"
KINDS = {  # share of the peak, hour of its own peak, how deep its night is; mean prompt and answer, in tokens
    "chat": (0.45, 15.0, 0.75, 1200, 350),
    "code": (0.35, 11.0, 0.95, 2000, 250),
    "summary": (0.20, 2.0, 0.6, 3000, 200),
}
METHODS = {"eagle3": {"num_speculative_tokens": 3}, "suffix": {"num_speculative_tokens": 16}}
SPECS = [
    ReplicaSpec(f"{method}-{number}", Method(method), config, CALIBRATION)
    for method, config in METHODS.items()
    for number in range(MOST)
]


def traffic(hours: float, peak: float, seed: int = 0) -> list[ReplayRequest]:
    """Return two days, the second a tenth busier; within minutes the rate is uneven, as that of real traffic is."""
    rng, made = np.random.default_rng(seed), list[tuple[float, str, int, int]]()
    for minute in range(round(2 * hours * 60)):
        hour = minute / 60.0 / hours * 24.0
        growth = 1.0 if hour < 24.0 else 1.1
        for kind, (share, at, depth, prompt, answer) in KINDS.items():
            swing = 1.0 - depth * (0.5 - 0.5 * math.cos((hour - at) / 24.0 * 2.0 * math.pi))
            rate = peak * share * growth * swing * rng.lognormal(-0.005, 0.1)
            for at_s in rng.uniform(60.0 * minute, 60.0 * minute + 60.0, rng.poisson(60.0 * rate)):
                prompt_tokens, tokens = (max(8, int(mean * rng.lognormal(-0.18, 0.6))) for mean in (prompt, answer))
                made.append((float(at_s), kind, prompt_tokens, tokens))
    return [
        replay_request(TraceRecord(prompt_tokens=prompt, output_tokens=answer, workload=kind), at_s, 0.0)
        for at_s, kind, prompt, answer in sorted(made)
    ]


class Days(_Simulation):
    """A replay in which replicas come and go each minute."""

    def __init__(self, requests: Sequence[ReplayRequest], start: Counter[str], start_up_s: float, seed: int = 0):
        slo = {"tpot_ms": 1e3 * TPOT_S, "ttft_ms": 1e3 * TTFT_S}
        settings = LearnedSettings.model_validate({"slo": slo, "seed": seed, "calibration": CALIBRATION})
        policy = build("learned", settings)
        super().__init__(SPECS, requests, policy, seed, remembers=False)
        assert isinstance(policy, Learned)
        self.policy = policy
        self.all = list(self._replicas)
        self.start_up_s = start_up_s
        self.since = {f"{method}-{each}": -math.inf for method, count in start.items() for each in range(count)}
        self.leaving: set[str] = set()
        self.paid_s = 0.0
        self.look()

    def look(self) -> None:
        """Have the policy choose among those that are up."""
        self._replicas = self.all
        up = {name for name, since_s in self.since.items() if since_s <= self._now_s} - self.leaving
        self.up = [(each.method.value, each) for each in self.all if each.name in up]

    def arrive(self, number: int, request: ReplayRequest, at_s: float) -> None:
        """Send a request to one of those that are up."""
        self._replicas = [each for _, each in self.up]
        super().arrive(number, request, at_s)

    def _submit(self, replica: int, request: ReplayRequest) -> int:
        self._replicas = self.all
        return super()._submit(replica, request)

    def set(self, wanted: Counter[str]) -> None:
        """Begin replicas, or take them away."""
        for method in METHODS:
            mine = [name for name in self.since if name.startswith(method) and name not in self.leaving]
            for name in sorted(mine, key=lambda name: -self.since[name])[: max(0, len(mine) - wanted[method])]:
                self.leaving.add(name)
            free = [each.name for each in self.all if each.name.startswith(method) and each.name not in self.since]
            for name in free[: max(0, wanted[method] - len(mine))]:
                self.since[name] = self._now_s + self.start_up_s

    def minute(self, until_s: float, counted: bool) -> None:
        """Advance, and pay."""
        self.advance(until_s)
        for each in self.all:
            if each.name in self.leaving and not each.in_flight:
                self.leaving.discard(each.name)
                del self.since[each.name]
        self.paid_s += 60.0 * len(self.since) * counted
        self.look()


Scaler = Callable[[Days, list[Minute]], Counter[str]]


def fixed(**counts: int) -> Scaler:
    """Return a fleet that stays."""
    return lambda days, minutes: Counter(counts)


def halves(count: int) -> Counter[str]:
    """Return half of each method."""
    return Counter(eagle3=(count + 1) // 2, suffix=count // 2)


def on_queue(target: int) -> Scaler:
    """Return Kubernetes' rule on requests in flight for each replica, with its five minutes before it takes away."""
    wanted: list[int] = []

    def scale(days: Days, minutes: list[Minute]) -> Counter[str]:
        in_flight, count = sum(each.in_flight for _, each in days.up), len(days.up)
        ratio = in_flight / count / target
        wanted.append(min(MOST, max(1, count if abs(ratio - 1.0) < 0.1 else math.ceil(count * ratio))))
        return Counter(eagle3=max(wanted[-5:]))

    return scale


def by_fleet(day_minutes: int, start_up_s: float) -> Scaler:
    """Return what `gateway_replicas_needed` says, taken away after it said so for five minutes, as with KEDA."""
    fleet, past = ModelFleet(day_minutes, math.ceil(start_up_s / 60.0)), []

    def scale(days: Days, minutes: list[Minute]) -> Counter[str]:
        fleet.minutes.append(minutes[-1])
        fleet.update(days.policy, days.up, {})
        past.append(Counter(fleet.needed or halves(MOST)))
        wanted = Counter({method: max(each[method] for each in past[-5:]) for method in METHODS})
        while wanted.total() > MOST:
            wanted[max(METHODS, key=lambda method: wanted[method] - past[-1][method])] -= 1
        return wanted

    return scale


def play(requests: Sequence[ReplayRequest], hours: float, start_up_s: float, scale: Scaler) -> tuple[float, float, str]:
    """Return the share of the second day's requests within the targets, its mean replicas, and those of each method."""
    days, minutes, at, began, mixes = Days(requests, halves(MOST), start_up_s), [], 0, 0, Counter[str]()
    total = round(2 * hours * 60)
    for minute in range(total):
        tokens = [0, 0, 0]
        while at < len(requests) and requests[at].arrived_s < 60.0 * (minute + 1):
            one = requests[at]
            days.arrive(at, one, one.arrived_s)
            days.ends.clear()
            tokens = [tokens[0] + 1, tokens[1] + one.prompt_tokens, tokens[2] + one.output_tokens]
            at += 1
        days.minute(60.0 * (minute + 1), counted=minute >= total // 2)
        minutes.append(Minute(tokens[0], tokens[1], tokens[2], tokens[2]))
        began = at if minute < total // 2 else began
        days.set(scale(days, minutes))
        if minute >= total // 2:
            mixes.update(method for method, _ in days.up)
    result = days.finish(began)
    good = (result.ttft_s <= TTFT_S) & ~(result.tpot_s > TPOT_S)
    share = float(good.sum() / (len(good) + result.errors))
    mix = ", ".join(f"{mixes[method] / (total // 2):.2f} {method}" for method in METHODS)
    return share, days.paid_s / (60.0 * (total // 2)), mix


def main() -> None:
    """Print a row for each way to follow the traffic."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=1.5)
    parser.add_argument("--start-up", type=float, default=180.0)
    parser.add_argument("--peak", type=float, default=16.0, help="requests per second")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    requests = traffic(given.hours, given.peak)
    print(f"{len(requests):,} requests", flush=True)
    day = round(given.hours * 60)
    scalers: dict[str, Callable[[], Scaler]] = {
        "fixed, 8": lambda: fixed(eagle3=8),
        "fixed, 4 and 4": lambda: fixed(eagle3=4, suffix=4),
        "fixed, 6": lambda: fixed(eagle3=6),
        **{f"queue, {target}": partial(on_queue, target) for target in (10, 15, 20)},
        "fleet": lambda: by_fleet(day, given.start_up),
    }
    print("| follows | within the targets | mean replicas | of which |\n|---|---|---|---|", flush=True)
    for name, scaler in scalers.items():
        if given.only in name:
            began_s = time.perf_counter()
            share, mean, mix = play(requests, given.hours, given.start_up, scaler())
            print(f"| {name} | {share:.1%} | {mean:.2f} | {mix} | {time.perf_counter() - began_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
