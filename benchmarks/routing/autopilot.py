"""`gateway autopilot` over a day in virtual time: `python -m benchmarks.routing.autopilot FOLDER [--json FILE]`.

FOLDER holds the recordings of SpecDecode-Bench, as for `python -m benchmarks.routing`. The traffic drifts from chat to
code and back within 24 hours. Its rate goes from 20% to 120% of what the starting mix serves with full batches, and
back, six hours later. Each hour is played as a sample of its requests, on an idle pool with a policy that has learned
nothing; the first 150 of 500 requests do not count. So an hour above capacity is only as bad as its sample is
long.

At the start of each hour the autopilot sees what the recorder would have kept of the last two: texts, times, and the
acceptance of EAGLE-3 only where that served. It judges its last change, or plans, with the code of the command. Each
restart takes a replica out for three minutes: that part of the hour is played with the others alone. All fixed mixes
of the same methods play every third of the same hours, and the best five of them all hours. Ratios are of the mean time
to finish over the requests of the day.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from backends.calibration.calibration import load_calibration
from backends.speculation import Method
from benchmarks.routing.ground import WORKLOADS, Ground, capacity, ground_of
from gateway.config.settings import PolicyReference
from lab.autopilot.capacity import requests_per_second
from lab.autopilot.control import Compared, Seen, compare
from lab.autopilot.journal import Speculation
from lab.autopilot.proposal import Proposal, Rule, propose
from lab.autopilot.traffic import seen
from lab.replay.request import ReplayRequest
from lab.replay.simulate import Replayed, ReplicaSpec, replay
from lab.trace import TraceRecord
from policies.guarded.policy import build

CALIBRATION = "llama-3.1-8b-h100"
START = "b/n/s/e"
METHODS: tuple[tuple[Method, tuple[int, ...]], ...] = (
    (Method.BASELINE, (0,)),
    (Method.NGRAM, (5,)),
    (Method.SUFFIX, (24,)),
    (Method.EAGLE3, (3,)),
)
KINDS = {
    "b": Speculation(method=Method.BASELINE),
    "n": Speculation(method=Method.NGRAM, config={"num_speculative_tokens": 5, "prompt_lookup_max": 4}),
    "s": Speculation(method=Method.SUFFIX),
    "e": Speculation(method=Method.EAGLE3, config={"num_speculative_tokens": 3}),
}
HOUR_S, RESTART_S, WINDOW_H = 3600.0, 180.0, 2
MARGIN, TOLERANCE, MOST_LOAD = 0.03, 0.02, 0.8
WARM, COUNTED = 150, 350
POLICY = PolicyReference.model_validate({"name": "learned", "seed": 0})
Fleet = dict[str, Speculation]


@dataclass(frozen=True, slots=True)
class Hour:
    """One hour: the requests of its sample, from 0 on, and their rate."""

    number: int
    requests: tuple[ReplayRequest, ...]
    per_s: float


@dataclass(slots=True)
class Day:
    """What the autopilot did in a day.

    Attributes
    ----------
    means_s
        Mean time to finish, by hour.
    """

    means_s: list[float] = field(default_factory=list)
    restarts: int = 0
    changes: list[str] = field(default_factory=list)
    undone: int = 0
    postponed: int = 0


def hours_of(ground: Ground, count: int, seed: int) -> list[Hour]:
    """Return the hours of a day."""
    rng = Random(seed)
    gaps = np.random.default_rng(seed)
    served = capacity(ground, START, "even")
    hours = []
    for number in range(count):
        turn = 2.0 * math.pi * number / count
        code = 0.5 - 0.5 * math.cos(turn)
        load = 0.7 - 0.5 * math.cos(turn - math.pi / 2)
        weights = (0.7 * (1 - code) + 0.1, 0.7 * code + 0.1, 0.05, 0.05)
        names = list(WORKLOADS.values())
        chosen = [rng.choice(ground.requests[name]) for name in rng.choices(names, weights, k=WARM + COUNTED)]
        at_s = np.cumsum(gaps.exponential(1.0 / (load * served), len(chosen)))
        timed = tuple(replace(one, arrived_s=float(at)) for one, at in zip(chosen, at_s, strict=True))
        hours.append(Hour(number, timed, load * served))
    return hours


def play(fleet: Mapping[str, Speculation], hour: Hour, seed: int) -> Replayed:
    """Play an hour's sample on a fleet."""
    pool = [ReplicaSpec(name, one.method, one.config, CALIBRATION) for name, one in fleet.items()]
    return replay(pool, hour.requests, build(POLICY.name, POLICY.settings), seed=seed, warmup=WARM)


def recorded(hour: Hour, fleet: Mapping[str, Speculation], played: Replayed) -> list[tuple[ReplayRequest, TraceRecord]]:
    """Return what the recorder keeps of the requests that count, spread over the hour."""
    names = list(fleet.values())
    kept = []
    for number, e2e_s, backend in zip(played.number, played.e2e_s, played.backend, strict=True):
        request, runs = hour.requests[number], names[backend]
        at_s = HOUR_S * (hour.number + (request.arrived_s - hour.requests[WARM].arrived_s) / _sample_s(hour))
        acceptance: dict[str, float] = {}
        script = request.script(runs.method, runs.config.get("num_speculative_tokens", 0), runs.config)
        if runs.method is Method.EAGLE3 and script is not None and request.output_tokens > 1:
            acceptance = {runs.method.value: _tokens_per_step(script.emitted)}
        known = replace(request, acceptance=acceptance, _scripts={})
        record = TraceRecord(
            arrived_at=at_s, workload=request.features.workload, prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens, status=200, e2e_s=float(e2e_s), endpoint="completions",
        )  # fmt: skip
        kept.append((known, record))
    return kept


def _sample_s(hour: Hour) -> float:
    return hour.requests[-1].arrived_s - hour.requests[WARM].arrived_s + 1.0 / hour.per_s


def _tokens_per_step(emitted: Sequence[int]) -> float:
    position = steps = 0
    while position < len(emitted):
        position += int(emitted[position])
        steps += 1
    return len(emitted) / steps


class Pilot:
    """The autopilot's way through a day."""

    def __init__(self, hours: Sequence[Hour], start: Fleet, seed: int) -> None:
        self.day = Day()
        self._hours = hours
        self._fleet = dict(start)
        self._seed = seed
        self._kept: list[list[tuple[ReplayRequest, TraceRecord]]] = []
        self._trial: tuple[int, int, Fleet, str] | None = None  # from, first hour after, the fleet before, in words
        self._pending: Fleet = {}
        self._before: Fleet = {}
        self._what = ""
        self._since = 0
        self._refused: list[Fleet] = []

    def run(self) -> Day:
        """Play all hours."""
        for hour in self._hours:
            steps = self._decide(hour)
            times = [np.zeros(0)]
            weights = []
            for name, runs in steps.items():  # one replica after the other
                others = {other: one for other, one in self._fleet.items() if other != name}
                times.append(play(others, hour, self._seed).e2e_s)
                weights.append(RESTART_S / HOUR_S)
                self._fleet[name] = runs
            played = play(self._fleet, hour, self._seed)
            times, weights = [*times[1:], played.e2e_s], [*weights, 1.0 - sum(weights)]
            self.day.means_s.append(sum(share * float(one.mean()) for share, one in zip(weights, times, strict=True)))
            self.day.restarts += len(steps)
            self._kept.append(recorded(hour, self._fleet, played))
        return self.day

    def _decide(self, hour: Hour) -> Fleet:
        """Return the replicas to restart in this hour."""
        if hour.number < WINDOW_H:
            return {}
        if self._pending:
            return self._allowed(hour)
        if self._trial is not None:
            start, changed, before, what = self._trial
            compared = self._compared(start, changed)
            if compared.is_loss(TOLERANCE):
                self.day.undone += 1
                self.day.changes.append(f"{hour.number:02}:00 undo {what}: {compared}")
                self._trial, self._since = None, hour.number
                back = {name: one for name, one in before.items() if self._fleet[name] != one}
                self._refused.append(dict(self._fleet))
                return back
            if hour.number - changed < WINDOW_H:
                return {}
            self._trial, self._since = None, changed
        proposal = self._proposal(hour)
        if Rule(MARGIN, RESTART_S, WINDOW_H * HOUR_S).objection(proposal) is not None:
            return {}
        after = self._fleet | dict(proposal.changes)
        if any(sorted(map(str, one.values())) == sorted(map(str, after.values())) for one in self._refused):
            return {}
        assert proposal.gain is not None
        what = f"{_title(self._fleet)} -> {_title(after)}"
        gain = proposal.gain
        self.day.changes.append(f"{hour.number:02}:00 {what}: {gain.value:.1%} ({gain.low:.1%} to {gain.high:.1%})")
        self._pending, self._before, self._what = dict(proposal.changes), dict(self._fleet), what
        return self._allowed(hour)

    def _proposal(self, hour: Hour) -> Proposal:
        requests: list[ReplayRequest] = []
        end_s = 0.0
        for number, kept in enumerate(self._kept[-WINDOW_H:], hour.number - WINDOW_H):
            begin_s = end_s + 1.0 / self._hours[number].per_s - kept[0][0].arrived_s
            requests += [replace(request, arrived_s=begin_s + request.arrived_s) for request, _ in kept]
            end_s = requests[-1].arrived_s
        return propose(
            requests, load_calibration(CALIBRATION), self._fleet, POLICY, METHODS, budget=30, jobs=1
        )  # fmt: skip

    def _allowed(self, hour: Hour) -> Fleet:
        """Return the next replicas to restart, as far as the others can carry the load of the last hour meanwhile."""
        requests = [request for request, _ in self._kept[-1]]
        rate = self._hours[hour.number - 1].per_s
        fleet, steps = dict(self._fleet), Fleet()

        def without(out: str) -> float:
            return requests_per_second(CALIBRATION, {name: one for name, one in fleet.items() if name != out}, requests)

        while self._pending:
            name = max(self._pending, key=without)
            if rate > MOST_LOAD * without(name):
                self.day.postponed += 1
                return steps
            fleet[name] = steps[name] = self._pending.pop(name)
        self._trial = self._since, hour.number, self._before, self._what
        return steps

    def _compared(self, start: int, changed: int) -> Compared:
        def period(hours: Sequence[int]) -> list[Seen]:
            result = []
            for number in hours:  # the sample stands for the whole hour: its load is that of the hour
                load = round(math.log(60.0 * self._hours[number].per_s, 1.25))
                found = seen([record for _, record in self._kept[number]])
                result += [replace(one, stratum=(one.stratum[0], load)) for one in found]
            return result

        return compare(period(range(start, changed)), period(range(changed, len(self._kept))))


def _title(fleet: Mapping[str, Speculation]) -> str:
    names = {Method.BASELINE: "b", Method.NGRAM: "n", Method.SUFFIX: "s", Method.EAGLE3: "e"}
    shown = [
        names[one.method] + ("*" if "num_speculative_tokens_per_batch_size" in one.config else "")
        for one in fleet.values()
    ]
    return "".join(sorted(shown))


def fleet_of(letters: str) -> Fleet:
    """Return a fleet with one replica per letter of `KINDS`."""
    return {f"{letter}-{number}": KINDS[letter] for number, letter in enumerate(letters)}


_EVERY, _FINALISTS = 3, 5
_hours: list[Hour] = []


def _start_worker(folder: Path, count: int, seed: int) -> None:
    logging.getLogger("policies").setLevel(logging.ERROR)  # what they say concerns simulated replicas
    _hours[:] = hours_of(ground_of(folder, None, tune=False), count, seed)


def _work(task: tuple[str, int | None]) -> tuple[str, int | None, Any]:
    letters, hour = task
    if hour is None:
        return letters, None, Pilot(_hours, fleet_of(letters), 0).run()
    return letters, hour, float(play(fleet_of(letters), _hours[hour], 0).e2e_s.mean())


def main() -> None:
    """Play a day, and print what the autopilot gained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the recordings")
    parser.add_argument("--hours", type=int, default=24, help="number of hours that the day is sampled at")
    parser.add_argument("--start", default="bnse", help="the starting mix: four letters of b, n, s, e")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--known", type=Path, help="the --json of an earlier run, for the fixed mixes")
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    arguments = parser.parse_args()
    mixes = ["".join(one) for one in combinations_with_replacement("bnse", len(arguments.start))]
    first = "".join(sorted(arguments.start, key="bnse".index))
    rates = _rates(arguments.hours)
    fixed: dict[str, dict[int, float]] = {mix: {} for mix in mixes}
    days: list[Day] = []
    times: dict[str, list[float]]
    initial = (arguments.folder, arguments.hours, arguments.seed)
    with get_context("spawn").Pool(len(os.sched_getaffinity(0)), _start_worker, initial) as workers:

        def run(tasks: Sequence[tuple[str, int | None]]) -> None:
            for mix, hour, result in workers.imap_unordered(_work, tasks):
                if hour is None:
                    days.append(result)
                else:
                    fixed[mix][hour] = result

        if arguments.known is not None:
            times = json.loads(arguments.known.read_text("utf-8"))["fixed"]
            run([(arguments.start, None)])
        else:
            scouted = range(0, arguments.hours, _EVERY)
            run([(arguments.start, None), *((mix, hour) for mix in mixes for hour in scouted)])
            means = {mix: np.average([fixed[mix][hour] for hour in scouted], weights=rates[::_EVERY]) for mix in mixes}
            finalists = {first, *sorted(mixes, key=means.__getitem__)[:_FINALISTS]}
            run([(mix, hour) for mix in finalists for hour in range(arguments.hours) if hour not in scouted])
            times = {mix: [fixed[mix][hour] for hour in range(arguments.hours)] for mix in finalists}
    (day,) = days
    mean = {mix: float(np.average(values, weights=rates)) for mix, values in times.items()}
    best, start = min(mean, key=mean.__getitem__), first
    own = float(np.average(day.means_s, weights=rates))
    ratios = {name: np.array(day.means_s) / np.array(times[name]) for name in (start, best)}
    print(f"autopilot {own:.3f} s; starting mix {start} {mean[start]:.3f} s; best fixed mix {best} {mean[best]:.3f} s")
    for name, what in ((start, "the starting mix"), (best, "the best fixed mix")):
        worst = int(np.argmax(ratios[name]))
        print(f"over {what}: {own / mean[name]:.3f}; worst hour {worst:02}:00, {ratios[name][worst]:.3f}")
    print(f"{len(day.changes)} changes, {day.restarts} restarts, {day.undone} undone, {day.postponed} hours postponed")
    print("\n".join(day.changes))
    if arguments.json is not None:
        document = {"autopilot": day.means_s, "fixed": times, "rates": rates, "changes": day.changes}
        arguments.json.write_text(json.dumps(document), encoding="utf-8")


def _rates(count: int) -> list[float]:
    return [0.7 - 0.5 * math.cos(2.0 * math.pi * hour / count - math.pi / 2) for hour in range(count)]


if __name__ == "__main__":
    main()
