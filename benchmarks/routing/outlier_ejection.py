"""Measure false and late outlier ejections.

`python -m benchmarks.routing.outlier_ejection FOLDER [--fault NAME] [--seeds N]`.

The workloads are those of `benchmarks.routing` (see there for FOLDER), pool 2s/2e at half load, with requests of two
kinds: with their recorded text, and without text, so that simulated replicas draw their acceptance. A fault begins with
the 1,001st request and changes what the policy observes of one replica: steps that take `slow` times as long, or drafts
of which only a share is accepted (`poor`). The table shows the ejections of healthy replicas per 10,000 answers, and
for each fault the number of the replica's answers that ended before it was ejected, as median and worst of all runs,
and the runs in which it was not ejected within the 1,000 requests that followed.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.routing.ground import Ground, Task, drawn, ground_of, pool_of, timed
from lab.simulation.request import ReplayRequest
from lab.simulation.simulate import replay
from policies.guarded.outlier_ejection import OutlierEjection
from policies.learned.policy import Learned, LearnedSettings
from policies.policy import Outcome

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
    """

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
    "steps 4 x, suffix": Fault("suffix-0", slow=4.0),
    "steps 8 x, EAGLE-3": Fault("eagle3-3", slow=8.0),
    "nothing accepted, suffix": Fault("suffix-0", poor=0.0),
    "a fifth accepted, EAGLE-3": Fault("eagle3-3", poor=0.2),
    "nothing accepted, EAGLE-3": Fault("eagle3-3", poor=0.0),
}


class RecordedEjection(OutlierEjection):
    """Outlier ejection that records the ejected backends."""

    def __init__(self) -> None:
        super().__init__()
        self.ejected: list[str] = []

    def observe(self, backend: str, *rest: Any) -> float:
        """See `OutlierEjection.observe`."""
        before = backend in self.reasons
        slowness = super().observe(backend, *rest)
        if backend in self.reasons and not before:
            self.ejected.append(backend)
        return slowness


@dataclass(slots=True)
class Count:
    """Counts of one run: answers of healthy replicas, their ejections, and the delay of the faulty one's."""

    answers: int = 0
    false: int = 0
    delay: int | None = None


class ObservedLearned(Learned):
    """`learned` that observes a fault and counts ejections."""

    def __init__(self, seed: int, fault: Fault) -> None:
        super().__init__(LearnedSettings(seed=seed))
        self.outlier_ejection = self.recorded = RecordedEjection()
        self._assemble()
        self.fault = fault
        self.count = Count()
        self._ended = 0
        self._of_faulty = 0

    def observe(self, outcome: Outcome) -> None:
        """Count the outcome, and learn from it."""
        self._ended += 1
        backend = outcome.decision.backend
        faulty = backend == self.fault.backend and self._ended > FAULT_FROM
        before = len(self.recorded.ejected)
        super().observe(self.fault.apply(outcome) if faulty else outcome)
        if not faulty:
            self.count.answers += 1
            self.count.false += len(self.recorded.ejected) - before
            return
        self._of_faulty += 1
        if len(self.recorded.ejected) > before and self.count.delay is None:
            self.count.delay = self._of_faulty


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
    print("| requests | fault | answers of healthy replicas | ejected | per 10,000 | delay: median | worst | missed |")
    print("|---|---|---|---|---|---|---|---|")
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
            delay = ["", "", ""]
            if fault.backend:
                missed = f"{len(runs) - len(delays)} of {len(runs)}"
                delay = [f"{statistics.median(delays):g}", str(max(delays)), missed] if delays else ["", "", missed]
            row = [kind, name, str(answers), str(false), f"{1e4 * false / answers:.2f}", *delay]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
