"""Compare advice with what the advised change gains in the simulator.

`python -m benchmarks.routing.advice [--seeds N]`.

Each case is a pool of two replicas: of one method with a k that is wrong for its acceptance, or of a method that loses
and a baseline. The advice comes from the answers of a run with `learned`. The run is then repeated with the advised
change of the first finding with a gain, every request on the same replica as before, and the mean time per output token
is compared on the replica that changed. A gain is covered if it lies in the stated interval.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from backends.calibration.draft_profile import DraftProfile
from backends.calibration.load import load_calibration
from backends.simulator.engine.fleet import Fleet, SimulatedReplica
from backends.speculation import Method
from benchmarks import virtual_time
from benchmarks.table import head, row
from benchmarks.virtual_time import Call
from gateway.rooms.advice.advise import advise
from gateway.rooms.advice.evidence import BackendEvidence, ModelEvidence
from gateway.rooms.advice.finding import Finding
from gateway.rooms.advice.room import add_learned, positions_of
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings

Members = Sequence[tuple[Method, int]]


@dataclass(frozen=True, slots=True)
class Case:
    """A pool with something to advise.

    Parameters
    ----------
    accepted
        How often drafts are accepted, relative to the calibration.
    calibration, believed
        What the replicas take their step times from, and what the advice does.
    """

    name: str
    members: Members
    kind: str
    temperature: float
    per_s: float
    accepted: float = 1.0
    requests: int = 2500
    calibration: str = "llama-3.1-8b-h100"
    believed: str = "llama-3.1-8b-h100"


OTHER = "llama-3.1-70b-4xh100"
WITH_BASELINE = ((Method.DRAFT_MODEL, 3), (Method.BASELINE, 0))
CASES = (
    Case("eagle3, k = 10, chat at 1", ((Method.EAGLE3, 10),) * 2, "chat", 1.0, 6.0),
    Case("eagle3, k = 10, code at 0", ((Method.EAGLE3, 10),) * 2, "code", 0.0, 6.0),
    Case("eagle3, k = 10, summaries, full", ((Method.EAGLE3, 10),) * 2, "summarization", 0.7, 24.0),
    Case("eagle3, k = 1, code at 0", ((Method.EAGLE3, 1),) * 2, "code", 0.0, 6.0),
    Case("draft_model, k = 8, chat", ((Method.DRAFT_MODEL, 8),) * 2, "chat", 0.7, 4.0),
    Case("draft_model, a sixth accepted, and a baseline", WITH_BASELINE, "chat", 0.7, 6.0, accepted=1 / 6),
    Case("the same, full", WITH_BASELINE, "chat", 0.7, 24.0, accepted=1 / 6),
    Case(
        "draft_model, a sixth accepted, no baseline", ((Method.DRAFT_MODEL, 3),) * 2, "chat", 0.7, 4.0, accepted=1 / 6
    ),
    Case("70B by the calibration of 8B, eagle3, k = 8", ((Method.EAGLE3, 8),) * 2, "chat", 0.7, 3.0, calibration=OTHER),
    Case("the same, k = 1, code at 0", ((Method.EAGLE3, 1),) * 2, "code", 0.0, 3.0, calibration=OTHER),
    Case("ngram, k = 5, and a baseline", ((Method.NGRAM, 5), (Method.BASELINE, 0)), "chat", 1.0, 30.0),
    Case("eagle3, k = 3, sound", ((Method.EAGLE3, 3), (Method.EAGLE3, 3)), "math", 0.7, 6.0),
)


class Poor(SimulatedReplica):
    """A replica whose drafts are accepted less often."""

    accepted = 1.0

    def profile(self, kind: str, temperature: float) -> DraftProfile:
        """See `Replica.profile`."""
        profile = super().profile(kind, temperature)
        return replace(profile, factor=self.accepted * profile.factor)


@dataclass(frozen=True, slots=True)
class Played:
    """A run: the replica of each request, its seconds per output token, and the evidence for advice."""

    replica: Sequence[int]
    tpot_s: npt.NDArray[np.float64]
    evidence: ModelEvidence

    def mean_s(self, replica: int) -> float:
        """Return the mean seconds per output token of the requests of a replica."""
        return float(np.nanmean(self.tpot_s[np.array(self.replica) == replica]))


def play(case: Case, members: Members, seed: int, routed: Sequence[int] | None = None) -> Played:
    """Play a case with other members, by `learned` or with each request on a given replica."""
    known = load_calibration(case.calibration)
    replicas = [
        Poor(f"{method}-{number}", known, method, {"num_speculative_tokens": k} if k else None)
        for number, (method, k) in enumerate(members)
    ]
    for replica in replicas:
        replica.accepted = case.accepted
    policy = Learned(LearnedSettings(seed=seed, calibration=case.believed))
    fleet, rng = Fleet(replicas, seed), np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1.0 / case.per_s, case.requests)).tolist()
    prompts = rng.integers(50, 1200, case.requests).tolist()
    lengths = np.maximum(8, rng.lognormal(5.0, 0.6, case.requests)).astype(int).tolist()
    calls = [
        Call(
            time_s,
            RequestFeatures(
                "m",
                Endpoint.CHAT,
                template=f"t{number % 4}",
                prompt_tokens=prompt,
                workload=case.kind,
                temperature=case.temperature,
            ),
            length,
        )
        for number, (time_s, prompt, length) in enumerate(zip(at_s, prompts, lengths, strict=True))
    ]
    timeline, decisions = virtual_time.play(policy, fleet, calls, 50, routed)
    backends = []
    for number, replica in enumerate(replicas):
        counters = fleet.counters(number)
        positions = positions_of(counters.drafts, counters.accepted_at.tolist())
        backends.append(
            BackendEvidence(replica.name, replica.method, replica.num_speculative_tokens, positions=positions)
        )
    evidence = add_learned(ModelEvidence("m", tuple(backends)), policy, replicas)
    index_of = {replica.name: index for index, replica in enumerate(replicas)}
    return Played([index_of[decision.backend] for decision in decisions], timeline.tpot_s, evidence)


def advised(finding: Finding) -> tuple[Method, int]:
    """Return the method and k of a finding's change."""
    values = dict(line.split(" #")[0].strip().split(": ") for line in finding.change.splitlines() if ": " in line)
    method = Method(values.get("method", Method(finding.backend.rpartition("-")[0])))
    return method, int(values.get("num_speculative_tokens", 0))


def measure(case: Case, before: Played, number: int, member: tuple[Method, int], seed: int) -> float:
    """Return the share of the time per output token that another member in place of one replica saves."""
    members = [member if index == number else each for index, each in enumerate(case.members)]
    return 1.0 - play(case, members, seed, before.replica).mean_s(number) / before.mean_s(number)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    print(head("case", "seed", "advised", "stated gain", "gained", "covered"))
    covered = total = 0
    for case in CASES:
        for seed in range(arguments.seeds):
            before = play(case, case.members, seed)
            gains = [(each, each.gain) for each in advise(before.evidence) if each.gain is not None]
            if not gains:
                print(row(case.name, seed, "nothing", *[""] * 3), flush=True)
                continue
            finding, gain = gains[0]
            number, member = int(finding.backend.rpartition("-")[2]), advised(finding)
            gained = measure(case, before, number, member, seed)
            inside = gain.low <= gained <= gain.high
            covered, total = covered + inside, total + 1
            stated = f"{gain.share:.1%} ({gain.low:.1%} to {gain.high:.1%})"
            change = f"{finding.backend} to {member[0]}, k = {member[1]}"
            print(row(case.name, seed, change, stated, f"{gained:.1%}", "yes" if inside else "no"), flush=True)
    print(f"\n{covered} of {total} gains lie in the stated interval.")


if __name__ == "__main__":
    main()
