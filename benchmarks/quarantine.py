"""Healthy replicas put out, and how soon faulty ones are: `python -m benchmarks.outlier_ejection FOLDER [--seeds N]`.

The ground is that of `benchmarks.routing` (see there for FOLDER), pool 2s/2e, half load, and requests of two kinds:
with the text that was recorded, and without it, so that simulated replicas draw what lookups find. A fault sets in with
the 1,001st request, and is in what the policy is told of a replica's answers: steps that take `slow` times as long, or
drafts of which only a share is accepted (`poor`). Shown are quarantines of healthy replicas per 10,000 answers, and for
each fault how many of the replica's answers ended before it was out: the median and the worst of all runs, and in how
many it was not put out at all within the 1,000 requests that followed.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from benchmarks.routing_ground import Ground, Task, drawn, ground_of, pool_of, timed
from lab.replay.request import ReplayRequest
from lab.replay.simulate import replay
from policies.learned.outlier_ejection import OutlierEjection
from policies.learned.policy import Learned, LearnedSettings
from policies.policy import Outcome

POOL = "2s/2e"
LOAD = 0.5
REQUESTS = 2000
FAULT_FROM = 1000


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a replica from one request on.

    Parameters
    ----------
    slow
        Factor of the time of its steps.
    poor
        Factor of the tokens that its steps accept.
    """

    backend: str = ""
    slow: float = 1.0
    poor: float = 1.0

    def befall(self, outcome: Outcome) -> Outcome:
        """Return the outcome as it would have been told of the faulty replica."""
        told = outcome.tokens_per_step
        if told is None or outcome.tpot_s is None:
            return outcome
        tokens = 1.0 + self.poor * (told - 1.0)
        tpot_s = outcome.tpot_s * self.slow * told / tokens
        return replace(outcome, tokens_per_step=tokens, tpot_s=tpot_s)


FAULTS = {
    "none": Fault(),
    "steps 4 x, suffix": Fault("suffix-0", slow=4.0),
    "steps 8 x, EAGLE-3": Fault("eagle3-3", slow=8.0),
    "nothing accepted, suffix": Fault("suffix-0", poor=0.0),
    "a fifth accepted, EAGLE-3": Fault("eagle3-3", poor=0.2),
    "nothing accepted, EAGLE-3": Fault("eagle3-3", poor=0.0),
}


class Watched(OutlierEjection):
    """Counts who is put out."""

    def __init__(self) -> None:
        super().__init__()
        self.put_out: list[str] = []

    def observe(self, backend: str, *rest: float | None) -> float:
        """See `OutlierEjection.observe`."""
        before = backend in self.reasons
        slowness = super().observe(backend, *rest)  # type: ignore[arg-type]
        if backend in self.reasons and not before:
            self.put_out.append(backend)
        return slowness


@dataclass(slots=True)
class Count:
    """What came of one run."""

    answers: int = 0
    false: int = 0
    delay: int | None = None


class Watching(Learned):
    """Learned, told of a fault."""

    def __init__(self, seed: int, fault: Fault) -> None:
        super().__init__(LearnedSettings(seed=seed))
        self.outlier_ejection = self.watched = Watched()
        self._join()
        self.fault = fault
        self.count = Count()
        self._ended = 0
        self._of_faulty = 0

    def observe(self, outcome: Outcome) -> None:
        """Count, and learn."""
        self._ended += 1
        backend = outcome.decision.backend
        faulty = backend == self.fault.backend and self._ended > FAULT_FROM
        before = len(self.watched.put_out)
        super().observe(self.fault.befall(outcome) if faulty else outcome)
        if not faulty:
            self.count.answers += 1
            self.count.false += len(self.watched.put_out) - before
            return
        self._of_faulty += 1
        if len(self.watched.put_out) > before and self.count.delay is None:
            self.count.delay = self._of_faulty


def play(ground: Ground, mix: str, seed: int, fault: Fault, *, text: bool) -> Count:
    """Play one run."""
    requests: Sequence[ReplayRequest] = drawn(ground.requests, mix, REQUESTS, Random(seed))
    if not text:
        requests = [replace(one, text=None, acceptance={}, _scripts={}) for one in requests]
    requests = timed(ground, Task(POOL, mix, LOAD, "poisson", seed), requests)
    policy = Watching(seed, fault)
    replay(pool_of(POOL), requests, policy, seed=seed)
    return policy.count


def main() -> None:
    """Play all runs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="only this one; again")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    ground = ground_of(arguments.folder, None, False)
    print("| requests | fault | answers of healthy replicas | put out | per 10,000 | delay: median | worst | missed |")
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
            told = ["", "", ""]
            if fault.backend:
                missed = len(runs) - len(delays)
                told = (
                    [f"{statistics.median(delays):g}", str(max(delays)), f"{missed} of {len(runs)}"] if delays else told
                )
                told = told if delays else ["", "", f"{missed} of {len(runs)}"]
            row = [kind, name, str(answers), str(false), f"{1e4 * false / answers:.2f}", *told]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
