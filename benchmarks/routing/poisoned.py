"""Measure what requests that no drafter can serve do to the requests of others.

`python -m benchmarks.routing.poisoned [--seeds N]`.

A bystander's requests as in `benchmarks.routing.silent_drafters`: five kinds of work, 8B on an H100, on a baseline, an
n-gram and an EAGLE-3 replica. A thousand come at half load, the others at a sixteenth of it. Then another client sends
55 requests within 5 s, of which every step emits one token: their sampling excludes what is drafted. The table has the
bystander's mean time to finish in the minute after, over that without the other client, and the runs in which a replica
was accused.

`marked`: the request says so (`allowed_token_ids`, a choice ...). `unmarked`: it does not. `keyless`: all clients are
one. `two keys`: the requests have two keys by turns.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from dataclasses import replace
from typing import Any

import numpy as np

from backends.speculation import Method
from benchmarks.routing.silent_drafters import CALIBRATION, Observed, requests_of
from lab.replay.request import ReplayRequest
from lab.replay.simulate import ReplicaSpec, replay
from policies.features.request import Endpoint, RequestFeatures
from policies.guarded.outlier_ejection import OutlierEjection

POOL = (
    ReplicaSpec("baseline", Method.BASELINE, {}, CALIBRATION),
    ReplicaSpec("ngram", Method.NGRAM, {"num_speculative_tokens": 5}, CALIBRATION),
    ReplicaSpec("eagle3", Method.EAGLE3, {"num_speculative_tokens": 3}, CALIBRATION),
)
REQUESTS, BEGINS, POISONED, WITHIN_S, AFTER_S, QUIETER = 1200, 1000, 55, 5.0, 60.0, 8.0
LIKE = "eagle3, eagle, draft_model"
"""The pool of `silent_drafters` whose rate of requests, that of three replicas, is taken."""

WAYS = ("nobody", "marked", "unmarked", "keyless, one template", "keyless, many templates", "two keys")


class Ejection(OutlierEjection):
    """Outlier ejection, which counts the ejections."""

    def __init__(self) -> None:
        super().__init__()
        self.ejections = 0

    def _eject(self, *args: Any) -> None:
        self.ejections += 1
        super()._eject(*args)


def poisoned(way: str, begin_s: float, seed: int) -> list[ReplayRequest]:
    """Return the requests of the other client."""
    rng = np.random.default_rng(seed + 77)
    requests = []
    for number in range(POISONED if way != "nobody" else 0):
        keyless = way.startswith("keyless")
        features = RequestFeatures(
            "m",
            Endpoint.CHAT,
            temperature=0.0,
            workload="chat",
            template=f"other{number % (9 if way.endswith('many templates') else 1)}",
            prompt_tokens=100,
            restricted=way == "marked",
            client="" if keyless else f"other{number % 2}" if way == "two keys" else "other",
        )
        at_s = begin_s + float(rng.uniform(0, WITHIN_S))
        requests.append(ReplayRequest(at_s, features, 100, 60, {"eagle3": 1.0, "ngram": 1.0}, None, ()))
    return requests


def measured(way: str, seed: int) -> tuple[float, int]:
    """Return the bystander's mean time to finish in seconds, and the number of accusations."""
    client = "" if way.startswith("keyless") else "bystander"
    own = [
        replace(request, features=replace(request.features, client=client))
        for request in requests_of(LIKE, REQUESTS, seed, changing=False)
    ]
    begin_s = own[BEGINS].arrived_s
    own = [
        replace(request, arrived_s=begin_s + QUIETER * (request.arrived_s - begin_s))
        if request.arrived_s > begin_s
        else request
        for request in own
    ]
    requests = sorted([*own, *poisoned(way, begin_s, seed)], key=lambda request: request.arrived_s)
    policy = Observed(seed, ejects=True, watches=True, backend="")
    ejection = policy.outlier_ejection = Ejection()
    policy._assemble()
    played = replay(list(POOL), requests, policy, seed=seed)
    counted = [
        begin_s <= request.arrived_s < begin_s + WITHIN_S + AFTER_S
        and request.features.client == client
        and not request.features.template.startswith("other")
        for request in requests
    ]
    return float(played.e2e_s[np.array(counted)].mean()), len(policy.watched.accused) + ejection.ejections


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--way", action="append", choices=WAYS, help="only this row; may be repeated")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    print("| 55 requests of another client | mean E2E of the bystander, s | over nobody | runs with an accusation |")
    print("|---|---|---|---|")
    plain = float("nan")
    for way in arguments.way or WAYS:
        results = [measured(way, seed) for seed in range(arguments.seeds)]
        mean = statistics.fmean(mean for mean, _ in results)
        plain = mean if way == WAYS[0] else plain
        accused = sum(count > 0 for _, count in results)
        print(f"| {way} | {mean:.3f} | {mean / plain:.3f} | {accused} of {arguments.seeds} |", flush=True)


if __name__ == "__main__":
    main()
