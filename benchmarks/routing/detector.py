"""Measure false and late alarms of the detector: `python -m benchmarks.routing.detector FOLDER [--seeds N]`.

The workloads are those of `benchmarks.routing` (see there for FOLDER), pool 2s/2e at half load, with requests of two
kinds: with their recorded text, and without text, so that simulated replicas draw their acceptance. A fault begins with
the 1,001st request and changes what the policy observes of one replica: steps that take `slow` times as long, or drafts
of which only a share is accepted (`poor`). The table shows what was found of healthy replicas per 10,000 answers, and
for each fault the number of the replica's answers that ended before it was found, as median and worst of all runs, the
runs in which it was not found within the 1,000 requests that followed, and those in which it was found as another
fault.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from backends.backend import Candidate
from benchmarks.routing.ground import Ground, Task, drawn, ground_of, pool_of, timed
from lab.simulation.request import ReplayRequest
from lab.simulation.simulate import replay
from policies.features.request import RequestFeatures
from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings
from policies.policy import Decision, Outcome

POOL = "2s/2e"
LOAD = 0.5
REQUESTS = 2000
FAULT_FROM = 1000


@dataclass(frozen=True, slots=True)
class Fault:
    """A change of one replica's observed behaviour from one request on.

    Parameters
    ----------
    slow
        Factor on the time of its steps.
    poor
        Factor on the number of accepted tokens per step.
    what
        What the detector should call it.
    """

    what: str = ""
    backend: str = ""
    slow: float = 1.0
    poor: float = 1.0

    def apply(self, outcome: Outcome) -> Outcome:
        """Return the outcome as the faulty replica would have produced it."""
        healthy = outcome.tokens_per_step
        if healthy is None or outcome.tpot_s is None:
            return outcome
        tokens = 1.0 + self.poor * (healthy - 1.0)
        tpot_s = outcome.tpot_s * self.slow * healthy / tokens
        return replace(outcome, tokens_per_step=tokens, tpot_s=tpot_s)


FAULTS = {
    "none": Fault(),
    "steps 2.5 x, suffix": Fault("slow", "suffix-0", slow=2.5),
    "steps 4 x, suffix": Fault("slow", "suffix-0", slow=4.0),
    "steps 8 x, EAGLE-3": Fault("slow", "eagle3-3", slow=8.0),
    "nothing accepted, suffix": Fault("silent", "suffix-0", poor=0.0),
    "nothing accepted, EAGLE-3": Fault("silent", "eagle3-3", poor=0.0),
    "a fifth accepted, EAGLE-3": Fault("poor", "eagle3-3", poor=0.2),
}


@dataclass(slots=True)
class Count:
    """Counts of one run: answers of healthy replicas, what was found of them, and when which fault was found."""

    answers: int = 0
    false: int = 0
    delay: int | None = None
    what: str = ""


class ObservedLearned(Learned):
    """`learned` that observes a fault and counts what is found."""

    def __init__(self, seed: int, fault: Fault) -> None:
        super().__init__(LearnedSettings(seed=seed))
        self.fault = fault
        self.count = Count()
        self._sent = self._ended = self._of_faulty = 0

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Count the request."""
        self._sent += 1
        return super().choose(request, candidates)

    def observe(self, outcome: Outcome) -> None:
        """Count the outcome, and learn from it; after the last arrival only the slowest answers are left."""
        if self._sent == REQUESTS:
            return
        self._ended += 1
        backend = outcome.decision.backend
        faulty = backend == self.fault.backend and self._ended > FAULT_FROM
        before = self.detector.found.get(backend, ())
        super().observe(self.fault.apply(outcome) if faulty else outcome)
        new = [one.what for one in self.detector.found.get(backend, ()) if one not in before]
        if not faulty:
            self.count.answers += 1
            self.count.false += len(new)
            return
        self._of_faulty += 1
        if new and self.count.delay is None:
            self.count.delay, self.count.what = self._of_faulty, new[0]


def play(ground: Ground, mix: str, seed: int, fault: Fault, *, text: bool) -> Count:
    """Play one run and return its counts."""
    requests: Sequence[ReplayRequest] = drawn(ground.requests, mix, REQUESTS, Random(seed))
    if not text:
        requests = [replace(request, text=None, acceptance={}, _scripts={}) for request in requests]
    requests = timed(ground, Task(POOL, mix, LOAD, "poisson", seed), requests)
    policy = ObservedLearned(seed, fault)
    replay(pool_of(POOL), requests, policy, seed=seed)
    return policy.count


def main() -> None:
    """Play all runs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="only this fault; may be repeated")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    ground = ground_of(arguments.folder, None, False)
    heads = ["requests", "fault", "answers of healthy replicas", "found", "per 10,000", "delay: median", "worst"]
    print(f"| {' | '.join([*heads, 'missed', 'as another'])} |\n|{'---|' * 9}")
    for kind in ("recorded", "drawn"):
        for name in arguments.fault or FAULTS:
            fault = FAULTS[name]
            runs = [
                play(ground, mix, seed, fault, text=kind == "recorded")
                for mix in ("even", "templates")
                for seed in range(arguments.seeds)
            ]
            answers, false = sum(run.answers for run in runs), sum(run.false for run in runs)
            delays = [run.delay for run in runs if run.delay is not None]
            delay = ["", "", "", ""]
            if fault.backend:
                delay[2] = f"{len(runs) - len(delays)} of {len(runs)}"
                delay[3] = str(sum(run.what not in ("", fault.what) for run in runs))
            if fault.backend and delays:
                delay[:2] = f"{statistics.median(delays):g}", str(max(delays))
            row = [kind, name, str(answers), str(false), f"{1e4 * false / answers:.2f}", *delay]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
