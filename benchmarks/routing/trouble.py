"""Requests that break on one way of speculating: `python -m benchmarks.routing.trouble [--runs N]`.

Chat requests in virtual time on four simulated replicas, of which a fifth asks for thinking, half of them with a tool
too. Of those with thinking, a share goes wrong on EAGLE-3, at the end of the answer: it `failed` (the gateway sends it
once more, where possible to another method) or is `unusable` (its client has it). Before: `learned` without what it
counts of such trouble; after: with it. The last line is of healthy requests, of which one in 200 fails anywhere.
"""

from __future__ import annotations

import argparse
import heapq
import math
from random import Random
from statistics import fmean, median
from typing import NamedTuple

from backends.calibration.load import load_calibration
from backends.simulator.engine.fleet import Fleet, SimulatedReplica
from backends.speculation import Method
from benchmarks.table import head, row
from lab.simulation.simulate import outcome_of
from policies.arm import arm_of
from policies.decision import Decision
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings

POOLS = {
    "b/n/s/e": (Method.BASELINE, Method.NGRAM, Method.SUFFIX, Method.EAGLE3),
    "2s/2e": (Method.SUFFIX, Method.SUFFIX, Method.EAGLE3, Method.EAGLE3),
    "4 EAGLE-3": (Method.EAGLE3,) * 4,
}
SHARES = (0.02, 7 / 42, 0.5)
K = {Method.BASELINE: 0, Method.NGRAM: 5, Method.SUFFIX: 24, Method.EAGLE3: 3}
REQUESTS, RATE_PER_S, BREAKING = 4000, 24.0, "thinking"
SHAPES = ((), (), (), (), (), (), (), ("thinking",), ("thinking", "tools"), ("tools",))


_Job = tuple[float, int, str, RequestFeatures, int, float, float]
"""When it is sent, its number, the arm that it failed at, itself, its output tokens, its luck, and when it arrived."""


class Played(NamedTuple):
    """What became of the requests of a run."""

    bad: float  # of 1,000 with thinking, those of which the client has an error or a useless answer
    thinking_s: float
    others_s: float  # mean seconds to the answer of the others
    found_after: float  # requests with thinking at EAGLE-3 until the trouble was found; infinite if never


def _members(pool: str) -> list[SimulatedReplica]:
    calibration = load_calibration("llama-3.1-8b-h100")
    return [
        SimulatedReplica(f"{number}", calibration, method, {"num_speculative_tokens": K[method]} if K[method] else {})
        for number, method in enumerate(POOLS[pool])
    ]


def play(pool: str, share: float, problem: str, seed: int, *, counts: bool) -> Played:
    """Return a run under `learned`, which counts what goes wrong or does not."""
    rng, now_s = Random(seed), 1_000_000.0
    members = _members(pool)
    fleet, policy = Fleet(members, seed), Learned(LearnedSettings(seed=seed))
    policy.set_clock(lambda: now_s)
    waiting: list[_Job] = []
    at_s, found_after, asked = now_s, math.inf, 0
    for number in range(REQUESTS):
        at_s += rng.expovariate(RATE_PER_S)
        shape = rng.choice(SHAPES)
        request = RequestFeatures(
            "m", Endpoint.CHAT, prompt_tokens=400, temperature=0.7, client=rng.choice("xyz"), shape=shape
        )
        waiting.append((at_s, number, "", request, rng.randint(80, 400), rng.random(), at_s))
    under_way: dict[int, tuple[Decision, _Job]] = {}
    ends: dict[int, tuple[tuple[str, ...], float, bool]] = {}
    fitted_s = 0.0
    while waiting or under_way:
        until_s = waiting[0][0] if waiting else math.inf
        for done in fleet.advance(until_s):
            decision, job = under_way.pop(done.request_id)
            now_s = done.ended_s
            at_s, number, failed_arm, request, tokens, luck, arrived_s = job
            member = members[done.replica]
            breaks = BREAKING in request.shape and member.method is Method.EAGLE3
            asked += breaks
            is_bad = breaks and luck < share
            if counts and request.shape:
                policy.troubles.observe(request, member, problem if is_bad else "", done.e2e_s)
                if policy.troubles.refresh() and policy.troubles.found:
                    found_after = min(found_after, asked)
            if not (is_bad and problem == "failed"):
                policy.observe(outcome_of(request, decision, done, member.method))
            elif not failed_arm:  # once more, with its own luck there
                heapq.heappush(waiting, (now_s, number, arm_of(member), request, tokens, luck / share, arrived_s))
                continue
            ends[number] = request.shape, done.ended_s - arrived_s, is_bad
        if not waiting or waiting[0][0] > until_s:
            continue
        job = heapq.heappop(waiting)
        now_s, request = job[0], job[3]
        if now_s > fitted_s + 5.0 and (work := policy.maintenance()) is not None:
            work()
            fitted_s = now_s
        others = [each for each in members if arm_of(each) != job[2]] or members
        decision = policy.choose(request, others)
        sent = fleet.submit(int(decision.backend), request.prompt_tokens, job[4], now_s, kind="chat", temperature=0.7)
        under_way[sent] = decision, job
    thinking = [(e2e_s, is_bad) for shape, e2e_s, is_bad in ends.values() if BREAKING in shape]
    others_s = fmean(e2e_s for shape, e2e_s, _ in ends.values() if BREAKING not in shape)
    return Played(
        1000 * fmean(is_bad for _, is_bad in thinking), fmean(e2e_s for e2e_s, _ in thinking), others_s, found_after
    )


def false_alarms(seed: int, requests: int) -> int:
    """Return how often something is found in a pool where one of 200 requests fails, wherever it goes."""
    rng, now_s, alarms = Random(seed), 1_000_000.0, 0
    policy = Learned(LearnedSettings(seed=seed))
    policy.set_clock(lambda: now_s)
    members = _members("b/n/s/e")
    shapes = [shape for shape in SHAPES if shape] + [("json_schema",), ("several",), ("tools", "prompt_8k")]
    for _ in range(requests):
        now_s += 0.05
        request = RequestFeatures("m", Endpoint.CHAT, client=rng.choice("xyz"), shape=rng.choice(shapes))
        policy.troubles.observe(request, rng.choice(members), "failed" if rng.random() < 0.005 else "", 1.0)
        alarms += policy.troubles.refresh() and bool(policy.troubles.found)
    return alarms


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    print(head("pool", "problem", "share", "bad of 1,000, before", "after", "found after", "thinking", "others"))
    for pool in POOLS:
        for problem in ("failed", "unusable"):
            for share in SHARES:
                pairs = [
                    [play(pool, share, problem, seed, counts=each) for each in (False, True)] for seed in range(runs)
                ]
                before, after = ([pair[which] for pair in pairs] for which in (0, 1))
                bad = [fmean(each.bad for each in side) for side in (before, after)]
                found = median(each.found_after for each in after)
                ratios = [
                    fmean(getattr(each, name) for each in after) / fmean(getattr(each, name) for each in before)
                    for name in ("thinking_s", "others_s")
                ]
                cells = f"{share:.0%}", *(f"{each:.1f}" for each in bad), f"{found:.0f}"
                print(row(pool, problem, *cells, *(f"{ratio:.3f}" for ratio in ratios)), flush=True)
    alarms = sum(false_alarms(seed, 25_000) for seed in range(4))
    print(f"\n{alarms} false alarms in 100,000 healthy requests")


if __name__ == "__main__":
    main()
