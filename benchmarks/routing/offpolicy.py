"""Check the coverage of off-policy confidence intervals.

`python -m benchmarks.routing.offpolicy [--simulations N] [--load]`.

Logs are simulated many times with a known truth, and the share of 95% intervals that contain it is counted:

- `surface`: times follow a formula of the request and its backend; the truth is the formula's mean over the policy's
  choices for 200,000 further requests;
- `replicas`: simulated replicas in virtual time, with so few requests that they hardly overlap; the truth is a replay
  of 20,000 further requests under the policy itself.

`--load` instead raises the load of the second, and shows the error of the estimates when requests slow each other down.
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
from backends.draft_schedule import draft_schedule
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
"""Seconds per token of each backend relative to the first, by kind of text; used by `surface`."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request before routing."""

    kind: str
    temperature: float
    prompt_tokens: int
    output_tokens: int

    def record(self) -> TraceRecord:
        """Return what the gateway knows of the request on arrival."""
        return TraceRecord(
            model="m",
            endpoint=Endpoint.CHAT,
            workload=self.kind,
            temperature=self.temperature,
            prompt_tokens=self.prompt_tokens,
            max_tokens=2 ** math.ceil(math.log2(self.output_tokens + 1)),
        )


def draw(rng: np.random.Generator, count: int) -> list[Request]:
    """Return random requests of three kinds with long-tailed lengths, as in real traces."""
    kinds = rng.integers(0, len(KINDS), count)
    prompts = np.clip(rng.lognormal(5.5, 1.0, count), 8, 6000).astype(int)
    outputs = np.clip(rng.lognormal(4.8, 0.8, count), 4, 1500).astype(int)
    temperatures = rng.choice([0.0, 0.7, 1.0], count)
    return [
        Request(KINDS[kind], float(temperature), int(prompt), int(output))
        for kind, temperature, prompt, output in zip(kinds, temperatures, prompts, outputs, strict=True)
    ]


def build(name: str) -> Policy:
    """Return a new instance of one of `POLICIES`."""
    settings = dict(POLICIES[name])
    entry = policies()[str(settings.pop("name"))]
    return entry(entry.Settings.model_validate(settings))


def pool() -> list[LoggedCandidate]:
    """Return the idle pool."""
    return [LoggedCandidate(name, method, draft_schedule(method, config)) for name, (method, config) in POOL.items()]


def logging_shares(request: Request, explored: float) -> list[float]:
    """Return the propensities of the log: a preferred backend per kind, and `explored` shared evenly by all."""
    preferred = {"chat": 3, "code": 0, "summarization": 1}[request.kind]
    return [explored / len(POOL) + (1 - explored) * (index == preferred) for index in range(len(POOL))]


def surface_mean_s(request: Request, index: int) -> float:
    """Return the mean time of a request on a backend, by the formula."""
    return 0.05 + 2e-5 * request.prompt_tokens + 0.007 * request.output_tokens * _SPEED[request.kind][index]


def surface_log(seed: int, count: int, explored: float) -> Iterator[TraceRecord]:
    """Yield a log of `surface`, with 40% noise on each time."""
    rng = np.random.default_rng((seed, 1))
    for request in draw(rng, count):
        shares = logging_shares(request, explored)
        index = int(rng.choice(len(POOL), p=shares))
        e2e_s = surface_mean_s(request, index) * float(rng.lognormal(-0.08, 0.4))
        yield logged(request, shares, index, e2e_s, 0.1 * e2e_s, [0] * len(POOL))


def logged(
    request: Request, shares: Sequence[float], index: int, e2e_s: float, ttft_s: float, in_flight: Sequence[int]
) -> TraceRecord:
    """Return the record of a finished request."""
    names = list(POOL)
    arrival = request.record()
    return TraceRecord(
        **{field: getattr(arrival, field) for field in ("model", "endpoint", "workload", "temperature")},
        prompt_tokens=request.prompt_tokens,
        max_tokens=arrival.max_tokens,
        output_tokens=request.output_tokens,
        backend=names[index],
        method=POOL[names[index]][0],
        propensity=shares[index],
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
    """Return the mean time under a policy, by the formula."""
    rng, policy, idle = np.random.default_rng(99), build(name), pool()
    total = 0.0
    for request in draw(rng, count):
        shares = propensities(policy, features_of(request.record()), idle)
        total += sum(share * surface_mean_s(request, index) for index, share in enumerate(shares) if share)
    return total / count


def play(requests: Sequence[Request], seed: int, gap_s: float, choose: Callable[..., list[float]]) -> list[TraceRecord]:
    """Play requests on simulated replicas, sent with the probabilities that `choose` returns; return their records."""
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
        index = int(rng.choice(len(POOL), p=shares))
        sent.append((shares, index, [replica.in_flight for replica in fleet.replicas]))
        return index

    def observe(completion: Completion) -> None:
        ended[completion.request_id] = completion

    arrivals = (
        Arrival(float(at_s), request.prompt_tokens, request.output_tokens, request.kind, request.temperature)
        for at_s, request in zip(times, requests, strict=True)
    )
    run_fleet(fleet, arrivals, send, observe)
    return [
        logged(request, *sent[number][:2], ended[number].e2e_s, ended[number].ttft_s, sent[number][2])
        for number, request in enumerate(requests)
    ]


def replicas_log(seed: int, count: int, explored: float, gap_s: float = 60.0) -> list[TraceRecord]:
    """Return a log of simulated replicas."""
    requests = draw(np.random.default_rng((seed, 3)), count)
    return play(requests, seed, gap_s, lambda request, _: logging_shares(request, explored))


def replicas_truth(name: str, gap_s: float = 60.0, count: int = 20_000) -> float:
    """Return the mean end-to-end time when the policy itself chooses."""
    policy = build(name)

    def choose(request: Request, replicas: Sequence[LoggedCandidate]) -> list[float]:
        features: RequestFeatures = features_of(request.record())
        return propensities(policy, features, replicas)

    records = play(draw(np.random.default_rng(98), count), 98, gap_s, choose)
    return float(np.mean([record.e2e_s for record in records]))


def evaluation_of(kind: str, count: int, explored: float, name: str, seed: int) -> Evaluation:
    """Simulate one log and return the evaluation of one policy on it."""
    make = surface_log if kind == "surface" else replicas_log
    (evaluation,) = evaluate(read_log(make(seed, count, explored), {name: build(name)}), metrics=("e2e_s",), seed=seed)
    return evaluation


def covered(evaluations: Sequence[Evaluation], truth: float) -> dict[str, tuple[float, float, float, float]]:
    """Return the shares of intervals that contain the truth, are above and are below, and their width, by estimator."""
    rows = {}
    for name in ("ips", "snips", "dr"):
        means = [evaluation.metrics["e2e_s"].estimates[name].mean for evaluation in evaluations]
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
"""Kind, requests in the log, explored share, policy."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=300)
    parser.add_argument("--load", action="store_true", help="show the error of the estimates under load")
    arguments = parser.parse_args()
    if arguments.load:
        report_load()
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # one process per core
    heads = "truth from | requests | explored | policy | effective | refused | IPS | SNIPS | DR | width IPS, SNIPS, DR"
    print(f"| {heads} |\n{'|---' * (heads.count('|') + 1)}|", flush=True)
    with multiprocessing.get_context("spawn").Pool() as workers:
        for kind, count, explored, name in SCENARIOS:
            truth = surface_truth(name) if kind == "surface" else replicas_truth(name)
            evaluations = workers.map(
                partial(evaluation_of, kind, count, explored, name), range(arguments.simulations), chunksize=5
            )
            accepted = [each for each in evaluations if not each.refusal]
            rows = covered(accepted, truth)
            size = np.median([each.effective_sample_size for each in evaluations])
            cells = " | ".join(f"{row[0]:.1%}" for row in rows.values())
            widths = ", ".join(f"{row[3]:.1%}" for row in rows.values())
            print(
                f"| {kind} | {count:,} | {explored:.0%} | `{name}` | {size:.0f} | {len(evaluations) - len(accepted)} "
                f"| {cells} | ±{widths} |",
                flush=True,
            )


def report_load() -> None:
    """Print the error of the estimates relative to a replay, as requests overlap more."""
    print(f"| requests/s | in flight, log | policy | replay, s | IPS | SNIPS | DR | advice |\n{'|---' * 8}|")
    for rate in (0.02, 2.0, 10.0, 30.0, 60.0):
        for name in ("thresholds", "head"):
            log = replicas_log(7, 20_000, 1.0, 1 / rate)
            truth = replicas_truth(name, 1 / rate)
            (evaluation,) = evaluate(read_log(log, {name: build(name)}), metrics=("e2e_s",))
            busy = np.mean([candidate.in_flight for record in log for candidate in record.candidates])
            means = evaluation.metrics["e2e_s"].estimates
            cells = " | ".join(f"{means[which].mean.value / truth - 1:+.1%}" for which in ("ips", "snips", "dr"))
            advice = "replay it" if any("replay" in note for note in evaluation.notes) else ""
            print(f"| {rate:g} | {busy:.1f} | `{name}` | {truth:.3f} | {cells} | {advice} |", flush=True)


if __name__ == "__main__":
    main()
