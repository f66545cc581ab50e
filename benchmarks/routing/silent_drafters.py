"""Measure how soon silent drafters are found, how often healthy ones are accused, and what finding them is worth.

`python -m benchmarks.routing.silent_drafters [--seeds N]`.

Requests are drawn: five kinds of work with the acceptance of the calibration, each request with its own deviation; 8B
on an H100, Poisson arrivals. In the first table nothing is broken, but every 400 requests the traffic changes to
another mix of kinds and another temperature. In the second, one replica's drafts are never accepted any more from the
1,001st request on, and again from the 3,001st on. Its rows are `learned` without both tests, with outlier ejection only
(as before there was the other test), with the test for silent drafters only, and with both; and nothing broken.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
from collections.abc import Sequence

import numpy as np

from backends.speculation import Method
from benchmarks.routing.parts import Unwatched
from lab.replay.request import ReplayRequest
from lab.replay.simulate import ReplicaSpec, replay
from policies.features.request import ANY_REQUEST, Endpoint, RequestFeatures
from policies.guarded.evidence import Drafts
from policies.guarded.silent_drafters import Learned as Observation
from policies.guarded.silent_drafters import SilentDrafters
from policies.learned.policy import Learned, LearnedSettings
from policies.policy import Outcome

CALIBRATION = "llama-3.1-8b-h100"
KINDS = ("chat", "code", "math", "summarization", "reasoning")
TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 0.0, 1.3)
PERIOD = 400
BREAKS, HEALS, END = 1000, 3000, 4000
POOLS: dict[str, tuple[tuple[Method, int], ...]] = {
    "2 eagle3, ngram, baseline": ((Method.EAGLE3, 3), (Method.EAGLE3, 3), (Method.NGRAM, 5), (Method.BASELINE, 0)),
    "eagle3, eagle, draft_model": ((Method.EAGLE3, 5), (Method.EAGLE, 3), (Method.DRAFT_MODEL, 5)),
    "2 eagle3": ((Method.EAGLE3, 3), (Method.EAGLE3, 3)),
}
PER_S = {4: 24.0, 3: 20.0, 2: 14.0}
"""Requests per second by the number of replicas: about half of what they can serve."""


class Watched(SilentDrafters):
    """The test, which counts accusations."""

    def __init__(self) -> None:
        super().__init__()
        self.accused: list[str] = []

    def observe(
        self,
        backend: str,
        arm: str,
        expected: float | None,
        observed: float,
        now_s: float,
        learned: Observation | None = None,
        request: RequestFeatures = ANY_REQUEST,
        drafts: Drafts = (0, 0),
    ) -> Sequence[Observation]:
        """See `SilentDrafters.observe`."""
        before = backend in self.silent
        learnable = super().observe(backend, arm, expected, observed, now_s, learned, request, drafts)
        if backend in self.silent and not before:
            self.accused.append(backend)
        return learnable


class Observed(Learned):
    """`learned` that counts the answers of one backend until it is accused, and until it is trusted again."""

    def __init__(self, seed: int, *, ejects: bool, watches: bool, backend: str) -> None:
        super().__init__(LearnedSettings(seed=seed, outlier_ejection=ejects))
        self.watched = Watched()
        self.drafters = self.watched if watches else Unwatched()
        self._assemble()
        self._backend = backend
        self.breaks_s = self.heals_s = math.inf
        self.found_after: int | None = None
        self.trusted_after: int | None = None
        self._answers = [0, 0]

    def observe(self, outcome: Outcome) -> None:
        """Count the answer, and learn from it."""
        super().observe(outcome)
        now_s, silent = self.clock(), self._backend in self.drafters.silent
        if outcome.decision.backend != self._backend or now_s < self.breaks_s:
            return
        healed = now_s >= self.heals_s
        self._answers[healed] += 1
        if not healed and silent and self.found_after is None:
            self.found_after = self._answers[0]
        if healed and not silent and self.trusted_after is None:
            self.trusted_after = self._answers[1]


def specs(pool: str, silent_s: tuple[float, float] = (math.inf, math.inf)) -> list[ReplicaSpec]:
    """Return the replicas of a pool, of which the first falls silent."""
    return [
        ReplicaSpec(
            f"{method.value}-{number}",
            method,
            {"num_speculative_tokens": k} if k else {},
            CALIBRATION,
            silent_s=silent_s if number == 0 else (math.inf, math.inf),
        )
        for number, (method, k) in enumerate(POOLS[pool])
    ]


def requests_of(pool: str, count: int, seed: int, *, changing: bool) -> list[ReplayRequest]:
    """Return requests; with `changing`, of another mix and another temperature every `PERIOD` requests."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1.0 / PER_S[len(POOLS[pool])], count)).tolist()
    requests = []
    weights, temperature = np.ones(len(KINDS)), 0.0
    for number, arrived_s in enumerate(at_s):
        if changing and number % PERIOD == 0:
            weights = rng.dirichlet(np.full(len(KINDS), 0.5)) + 1e-3
            temperature = float(rng.choice(TEMPERATURES))
        kind = str(rng.choice(KINDS, p=weights / weights.sum()))
        prompt_tokens = int(rng.integers(50, 1200))
        features = RequestFeatures(
            "m",
            Endpoint.CHAT,
            temperature=temperature if changing else float(rng.choice((0.0, 0.7))),
            workload=kind,
            template=f"{kind}{rng.integers(5)}",
            prompt_tokens=prompt_tokens,
        )
        output_tokens = max(8, int(rng.lognormal(5.0, 0.7)))
        requests.append(ReplayRequest(arrived_s, features, prompt_tokens, output_tokens, {}, None, ()))
    return requests


def healthy(seeds: int, count: int) -> None:
    """Print the accusations of healthy backends."""
    print("| pool | answers | accused | per 10,000 |\n|---|---|---|---|")
    for pool in POOLS:
        accused = 0
        for seed in range(seeds):
            policy = Observed(seed, ejects=True, watches=True, backend="")
            replay(specs(pool), requests_of(pool, count, seed, changing=True), policy, seed=seed)
            accused += len(policy.watched.accused)
        answers = seeds * count
        print(f"| {pool} | {answers:,} | {accused} | {1e4 * accused / answers:.2f} |", flush=True)


def broken(seeds: int) -> None:
    """Print delays, and the mean time to finish while a drafter is silent."""
    print(
        "\n| pool | tests | found after: median, worst | trusted after | mean E2E, s | over nothing broken | missed |"
    )
    print("|---|---|---|---|---|---|---|")
    ways = {
        "nothing broken": (True, True),
        "none": (False, False),
        "outlier ejection": (True, False),
        "silent drafters": (False, True),
        "both": (True, True),
    }
    for pool in POOLS:
        plain = math.nan
        for name, (ejects, watches) in ways.items():
            means, found, trusted = [], [], []
            for seed in range(seeds):
                requests = requests_of(pool, END, seed, changing=False)
                policy = Observed(seed, ejects=ejects, watches=watches, backend=specs(pool)[0].name)
                silent_s = (math.inf, math.inf)
                if name != "nothing broken":
                    silent_s = policy.breaks_s, policy.heals_s = requests[BREAKS].arrived_s, requests[HEALS].arrived_s
                played = replay(specs(pool, silent_s), requests, policy, seed=seed)
                means.append(float(played.e2e_s[BREAKS:HEALS].mean()))
                found += [policy.found_after] if policy.found_after is not None else []
                trusted += [policy.trusted_after] if policy.trusted_after is not None else []
            mean = statistics.fmean(means)
            plain = mean if name == "nothing broken" else plain
            delays = f"{statistics.median(found):g}, {max(found)}" if found else ""
            returns = f"{statistics.median(trusted):g}, {max(trusted)}" if watches and found and trusted else ""
            missed = f"{seeds - len(found)} of {seeds}" if watches and name != "nothing broken" else ""
            row = (pool, name, delays, returns, f"{mean:.3f}", f"{mean / plain:.3f}", missed)
            print(f"| {' | '.join(row)} |", flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8000, help="requests of each healthy run")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    healthy(arguments.seeds, arguments.requests)
    broken(arguments.seeds)


if __name__ == "__main__":
    main()
