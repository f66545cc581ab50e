"""Compare advice with what the advised change gains in the simulator: `python -m benchmarks.routing.advice [--seeds N]`.

Each case is a pool of two replicas of one method with a k that is wrong for its acceptance, or of a method that loses
beside a baseline. The advice comes from the answers of a run with `learned`. For k, the best one is then searched in
runs with the same arrivals and each k from 1 to 10; for a method, the run is repeated with the advised one. Both
measure the mean time per output token. A gain is covered if it lies in the interval that was stated.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from backends.calibration.calibration import load_calibration
from backends.simulator.engine.fleet import Completion, Fleet, Replica
from backends.simulator.engine.virtual_time import Arrival, run_fleet
from backends.speculation import Method
from gateway.advice.advise import advise
from gateway.advice.evidence import BackendEvidence, ModelEvidence
from gateway.advice.finding import Finding
from gateway.advice.gather import add_learned, positions_of
from lab.replay.simulate import outcome_of
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.policy import Learned, LearnedSettings
from policies.policy import Decision

REQUESTS = 2500
Members = Sequence[tuple[Method, int]]


@dataclass(frozen=True, slots=True)
class Case:
    """A pool with something to advise."""

    name: str
    members: Members
    kind: str
    temperature: float
    per_s: float
    calibration: str = "llama-3.1-8b-h100"


TWO = ((Method.EAGLE3, 10), (Method.EAGLE3, 10))
CASES = (
    Case("eagle3, k = 10, chat at 1", TWO, "chat", 1.0, 6.0),
    Case("eagle3, k = 10, code at 0", TWO, "code", 0.0, 6.0),
    Case("eagle3, k = 10, summaries, full", TWO, "summarization", 0.7, 24.0),
    Case("eagle3, k = 1, code at 0", ((Method.EAGLE3, 1),) * 2, "code", 0.0, 6.0),
    Case("draft_model, k = 8, chat", ((Method.DRAFT_MODEL, 8),) * 2, "chat", 0.7, 4.0),
    Case(
        "draft_model, k = 8, beside a baseline, full",
        ((Method.DRAFT_MODEL, 8), (Method.BASELINE, 0)),
        "chat",
        1.0,
        24.0,
    ),
)


def play(case: Case, members: Members, seed: int) -> tuple[float, ModelEvidence]:
    """Return the mean seconds per output token, and the evidence for advice."""
    known = load_calibration(case.calibration)
    replicas = [
        Replica(f"{method}-{number}", known, method, {"num_speculative_tokens": k} if k else None)
        for number, (method, k) in enumerate(members)
    ]
    policy = Learned(LearnedSettings(seed=seed, calibration=case.calibration))
    now_s = 0.0
    policy.set_clock(lambda: now_s)
    fleet, index_of = Fleet(replicas, seed), {replica.name: index for index, replica in enumerate(replicas)}
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1.0 / case.per_s, REQUESTS)).tolist()
    prompts = rng.integers(50, 1200, REQUESTS).tolist()
    lengths = np.maximum(8, rng.lognormal(5.0, 0.6, REQUESTS)).astype(int).tolist()
    sent: list[tuple[RequestFeatures, Decision]] = []

    def choose(arrival: Arrival) -> int:
        nonlocal now_s
        now_s = arrival.arrived_s
        if len(sent) % 50 == 0 and (work := policy.maintenance()) is not None:
            work()
        features = RequestFeatures(
            "m",
            Endpoint.CHAT,
            temperature=case.temperature,
            workload=case.kind,
            template=f"t{len(sent) % 4}",
            prompt_tokens=arrival.prompt_tokens,
        )
        sent.append((features, policy.choose(features, replicas)))
        return index_of[sent[-1][1].backend]

    def observe(completion: Completion) -> None:
        features, decision = sent[completion.request_id]
        policy.observe(outcome_of(features, decision, completion, replicas[completion.replica].method))

    arrivals = map(partial(Arrival, kind=case.kind, temperature=case.temperature), at_s, prompts, lengths)
    timeline = run_fleet(fleet, arrivals, choose, observe)
    backends = []
    for number, replica in enumerate(replicas):
        counters = fleet.counters(number)
        positions = positions_of(counters.drafts, counters.accepted_at.tolist())
        backends.append(
            BackendEvidence(replica.name, replica.method, replica.num_speculative_tokens, positions=positions)
        )
    evidence = add_learned(ModelEvidence("m", tuple(backends)), policy, replicas)
    return float(np.nanmean(timeline.tpot_s)), evidence


def advised(finding: Finding) -> tuple[Method, int]:
    """Return the method and k of a finding's change."""
    values = dict(line.split(" #")[0].strip().split(": ") for line in finding.change.splitlines() if ": " in line)
    method = Method(values.get("method", Method(finding.backend.rpartition("-")[0])))
    return method, int(values.get("num_speculative_tokens", 0))


def changed(members: Members, findings: Sequence[Finding]) -> Members:
    """Return the members after all changes."""
    by_backend = {finding.backend: advised(finding) for finding in findings}
    return [by_backend.get(f"{method}-{number}", (method, k)) for number, (method, k) in enumerate(members)]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    print("| case | seed | advised | stated gain | gained | covered | best k found |\n|---|---|---|---|---|---|---|")
    covered = total = 0
    for case in CASES:
        for seed in range(arguments.seeds):
            before_s, evidence = play(case, case.members, seed)
            findings = advise(evidence)
            if not findings:
                print(f"| {case.name} | {seed} | nothing | | | | |", flush=True)
                continue
            best = ""
            if len(set(case.members)) == 1:
                method = case.members[0][0]
                times = {k: play(case, [(method, k)] * len(case.members), seed)[0] for k in range(1, 11)}
                best = str(min(times, key=times.__getitem__))
            after_s, _ = play(case, changed(case.members, findings), seed)
            gain, gained = findings[0].gain, 1.0 - after_s / before_s
            assert gain is not None
            inside = gain.low <= gained <= gain.high
            covered, total = covered + inside, total + 1
            changes = ", ".join(f"{finding.backend} to {':'.join(map(str, advised(finding)))}" for finding in findings)
            stated = f"{gain.share:.1%} ({gain.low:.1%} to {gain.high:.1%})"
            print(f"| {case.name} | {seed} | {changes} | {stated} | {gained:.1%} | {inside} | {best} |", flush=True)
    print(f"\n{covered} of {total} gains lie in the stated interval.")


if __name__ == "__main__":
    main()
