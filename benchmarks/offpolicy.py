"""Whether off-policy intervals hold what they say: `python -m benchmarks.offpolicy [--simulations N] [--load]`.

Logs are made over and over with a truth that is known, and it is counted how often the 95% interval holds it:

- `surface`: times follow a formula of the request and its backend; the truth is the formula's mean over the policy's
  choices for 200,000 further requests;
- `replicas`: simulated replicas in virtual time, so few requests that they hardly meet; the truth is a replay of
  20,000 further requests under the policy itself.

`--load` raises the load of the second instead, and shows by how much the estimates miss when requests slow each other.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from backends.calibration.calibration import load_calibration
from backends.simulator.engine.virtual_time import Arrival, run_fleet
from backends.speculation import Method
from lab.evaluate.estimators import Evaluation, evaluate
from lab.evaluate.log import LoggedCandidate, features_of, propensities, read_log
from lab.trace import TraceCandidate, TraceRecord
from policies.features.request import Endpoint, RequestFeatures
from policies.policy import Policy, policies

POOL: dict[str, tuple[Method, dict[str, int]]] = {
    "plain": (Method.BASELINE, {}),
    "lookup": (Method.NGRAM, {"num_speculative_tokens": 5, "prompt_lookup_max": 4}),
    "tree": (Method.SUFFIX, {}),
    "head": (Method.EAGLE3, {"num_speculative_tokens": 3}),
}
KINDS = ("chat", "code", "summarization")
POLICIES: Mapping[str, Mapping[str, object]] = {
    "thresholds": {"name": "thresholds", "seed": 1},
    "head": {"name": "static", "backend": "head"},
    "random": {"name": "random", "seed": 1},
}
_SPEED = {"chat": (1.0, 1.0, 0.9, 0.6), "code": (1.0, 0.75, 0.6, 0.65), "summarization": (1.0, 0.5, 0.55, 0.7)}
"""Of the surface: seconds per token of each backend over those of the first, by kind of text."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request that has not yet been sent anywhere."""

    kind: str
    temperature: float
    prompt_tokens: int
    output_tokens: int

    def record(self) -> TraceRecord:
        """Return what the gateway would know of it when it comes."""
        return TraceRecord(
            model="m",
            endpoint=Endpoint.CHAT,
            workload=self.kind,
            temperature=self.temperature,
            prompt_tokens=self.prompt_tokens,
            max_tokens=2 ** math.ceil(math.log2(self.output_tokens + 1)),
        )


def draw(rng: np.random.Generator, count: int) -> list[Request]:
    """Draw requests: long-tailed lengths, as those of real traces, of three kinds."""
    kinds = rng.integers(0, len(KINDS), count)
    prompts = np.clip(rng.lognormal(5.5, 1.0, count), 8, 6000).astype(int)
    outputs = np.clip(rng.lognormal(4.8, 0.8, count), 4, 1500).astype(int)
    temperatures = rng.choice([0.0, 0.7, 1.0], count)
    return [
        Request(KINDS[kind], float(temperature), int(prompt), int(output))
        for kind, temperature, prompt, output in zip(kinds, temperatures, prompts, outputs, strict=True)
    ]


def build(name: str) -> Policy:
    """Build one of `POLICIES`."""
    settings = dict(POLICIES[name])
    entry = policies()[str(settings.pop("name"))]
    return entry(entry.Settings.model_validate(settings))


def pool() -> list[LoggedCandidate]:
    """Return the pool when it is idle."""
    return [
        LoggedCandidate(name, method, int(config.get("num_speculative_tokens", 0)))
        for name, (method, config) in POOL.items()
    ]


def logging_shares(request: Request, explored: float) -> list[float]:
    """Return the log's propensities: a preference by kind, and every backend with an even part of `explored`."""
    preferred = {"chat": 3, "code": 0, "summarization": 1}[request.kind]
    return [explored / len(POOL) + (1 - explored) * (place == preferred) for place in range(len(POOL))]


def surface_mean_s(request: Request, place: int) -> float:
    """Return what a request takes on a backend on average, by the formula."""
    return 0.05 + 2e-5 * request.prompt_tokens + 0.007 * request.output_tokens * _SPEED[request.kind][place]


def surface_log(seed: int, count: int, explored: float) -> Iterator[TraceRecord]:
    """Yield a log of the surface, with 40% of noise on each time."""
    rng = np.random.default_rng((seed, 1))
    for request in draw(rng, count):
        shares = logging_shares(request, explored)
        place = int(rng.choice(len(POOL), p=shares))
        e2e_s = surface_mean_s(request, place) * float(rng.lognormal(-0.08, 0.4))
        yield logged(request, shares, place, e2e_s, 0.1 * e2e_s, [0] * len(POOL))


def logged(
    request: Request, shares: Sequence[float], place: int, e2e_s: float, ttft_s: float, in_flight: Sequence[int]
) -> TraceRecord:
    """Return the record of a request that has ended."""
    names = list(POOL)
    known = request.record()
    return TraceRecord(
        **{field: getattr(known, field) for field in ("model", "endpoint", "workload", "temperature")},
        prompt_tokens=request.prompt_tokens,
        max_tokens=known.max_tokens,
        output_tokens=request.output_tokens,
        backend=names[place],
        method=POOL[names[place]][0],
        propensity=shares[place],
        candidates=[
            TraceCandidate(name, POOL[name][0], None, share, running)
            for name, share, running in zip(names, shares, in_flight, strict=True)
        ],
        status=200,
        ttft_s=ttft_s,
        e2e_s=e2e_s,
    )


@cache
def surface_truth(name: str, count: int = 200_000) -> float:
    """Return the mean under a policy, by the formula."""
    rng, policy, idle = np.random.default_rng(99), build(name), pool()
    total = 0.0
    for request in draw(rng, count):
        shares = propensities(policy, features_of(request.record()), idle)
        total += sum(share * surface_mean_s(request, place) for place, share in enumerate(shares) if share)
    return total / count


def play(requests: Sequence[Request], seed: int, gap_s: float, choose: Callable[..., list[float]]) -> list[TraceRecord]:
    """Play requests on simulated replicas, each sent by the shares that `choose` returns, and log them."""
    from backends.simulator.engine.fleet import Completion, Fleet, Replica

    calibration = load_calibration("llama-3.1-8b-h100")
    fleet = Fleet([Replica(name, calibration, *how) for name, how in POOL.items()], seed=seed)
    rng = np.random.default_rng((seed, 2))
    times = np.cumsum(rng.exponential(gap_s, len(requests)))
    sent: list[tuple[list[float], int, list[int]]] = []
    ended: dict[int, Completion] = {}

    def send(arrival: Arrival) -> int:
        request = requests[len(sent)]
        shares = choose(request, fleet.replicas)
        place = int(rng.choice(len(POOL), p=shares))
        sent.append((shares, place, [replica.in_flight for replica in fleet.replicas]))
        return place

    def note(completion: Completion) -> None:
        ended[completion.request_id] = completion

    arrivals = (
        Arrival(float(at_s), one.prompt_tokens, one.output_tokens, one.kind, one.temperature)
        for at_s, one in zip(times, requests, strict=True)
    )
    run_fleet(fleet, arrivals, send, note)
    return [
        logged(request, *sent[number][:2], ended[number].e2e_s, ended[number].ttft_s, sent[number][2])
        for number, request in enumerate(requests)
    ]


def replicas_log(seed: int, count: int, explored: float, gap_s: float = 60.0) -> list[TraceRecord]:
    """Return a log of simulated replicas."""
    requests = draw(np.random.default_rng((seed, 3)), count)
    return play(requests, seed, gap_s, lambda request, _: logging_shares(request, explored))


def replicas_truth(name: str, gap_s: float = 60.0, count: int = 20_000) -> float:
    """Return the mean time to finish when the policy itself chooses."""
    policy = build(name)

    def choose(request: Request, replicas: Sequence[LoggedCandidate]) -> list[float]:
        features: RequestFeatures = features_of(request.record())
        return propensities(policy, features, replicas)

    records = play(draw(np.random.default_rng(98), count), 98, gap_s, choose)
    return float(np.mean([record.e2e_s for record in records]))


def one(kind: str, count: int, explored: float, name: str, seed: int) -> Evaluation:
    """Make one log and evaluate one policy on it."""
    make = surface_log if kind == "surface" else replicas_log
    (found,) = evaluate(read_log(make(seed, count, explored), {name: build(name)}), metrics=("e2e_s",), seed=seed)
    return found


def covered(found: Sequence[Evaluation], truth: float) -> dict[str, tuple[float, float, float, float]]:
    """Return by estimator: shares of intervals that hold the truth, are above and below it; their relative width."""
    rows = {}
    for name in ("ips", "snips", "dr"):
        means = [one.metrics["e2e_s"].estimates[name].mean for one in found]
        above = float(np.mean([mean.low > truth for mean in means]))
        below = float(np.mean([mean.high < truth for mean in means]))
        width = float(np.median([(mean.high - mean.low) / (2 * truth) for mean in means]))
        rows[name] = (1 - above - below, above, below, width)
    return rows


SCENARIOS = (
    ("surface", 2000, 1.0, "head"),
    ("surface", 4000, 0.2, "thresholds"),
    ("surface", 4000, 0.2, "random"),
    ("replicas", 2000, 1.0, "head"),
    ("replicas", 4000, 0.2, "thresholds"),
)
"""Kind, requests in the log, share that is explored, policy."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=300)
    parser.add_argument("--load", action="store_true", help="how far estimates are off under load")
    arguments = parser.parse_args()
    if arguments.load:
        report_load()
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # one process on each core
    heads = "truth from | requests | explored | policy | effective | refused | IPS | SNIPS | DR | width IPS, SNIPS, DR"
    print(f"| {heads} |\n{'|---' * (heads.count('|') + 1)}|", flush=True)
    with multiprocessing.get_context("spawn").Pool() as workers:
        for kind, count, explored, name in SCENARIOS:
            truth = surface_truth(name) if kind == "surface" else replicas_truth(name)
            every = workers.map(partial(one, kind, count, explored, name), range(arguments.simulations), chunksize=5)
            told = [found for found in every if not found.refusal]
            rows = covered(told, truth)
            size = np.median([found.effective_sample_size for found in every])
            cells = " | ".join(f"{row[0]:.1%}" for row in rows.values())
            widths = ", ".join(f"{row[3]:.1%}" for row in rows.values())
            print(
                f"| {kind} | {count:,} | {explored:.0%} | `{name}` | {size:.0f} | {len(every) - len(told)} "
                f"| {cells} | ±{widths} |",
                flush=True,
            )


def report_load() -> None:
    """Print how far the estimates are from a replay as requests meet more often."""
    print(f"| requests/s | in flight, log | policy | replay, s | IPS | SNIPS | DR | said |\n{'|---' * 8}|")
    for rate in (0.02, 2.0, 10.0, 30.0, 60.0):
        for name in ("thresholds", "head"):
            log = replicas_log(7, 20_000, 1.0, 1 / rate)
            truth = replicas_truth(name, 1 / rate)
            (found,) = evaluate(read_log(log, {name: build(name)}), metrics=("e2e_s",))
            busy = np.mean([candidate.in_flight for record in log for candidate in record.candidates])
            means = found.metrics["e2e_s"].estimates
            cells = " | ".join(f"{means[one].mean.value / truth - 1:+.1%}" for one in ("ips", "snips", "dr"))
            said = "replay it" if any("replay" in note for note in found.notes) else ""
            print(f"| {rate:g} | {busy:.1f} | `{name}` | {truth:.3f} | {cells} | {said} |", flush=True)


if __name__ == "__main__":
    main()
