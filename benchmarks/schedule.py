"""Compare schedules of k by batch size with the best k that the simulator has at each batch size.

`python -m benchmarks.schedule [--requests N] [--seed N]`.

Each case plants an acceptance in the replicas of a calibration. Its schedule is chosen from steps that other requests
took (as a trace records them), and from the counters of an engine that always drafts 8 tokens (as `--live` reads them).
The true best k is found by force: for each batch size and each k from 0 to 8, an engine whose batch is always full
serves the same requests with the same draws, and its output tokens per second are measured.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from backends.calibration.calibration import load_calibration
from backends.calibration.draft_profile import DraftProfile
from backends.calibration.parameters import EngineParameters
from backends.simulator.engine.fleet import Fleet, Replica
from backends.speculation import Method
from lab.plan.drafts import best_schedule, mean_context_tokens, tokens_per_step
from lab.replay.request import ReplayRequest, replay_request
from lab.trace import TraceRecord

Floats = npt.NDArray[np.float64]
LONGEST_K = 8
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SPREAD = 0.6
"""Standard deviation between requests of the logits of acceptance."""
LOW, GOOD, FADING = (0.55,) * LONGEST_K, (0.8,) * LONGEST_K, tuple(0.75 - 0.05 * place for place in range(LONGEST_K))


@dataclass(frozen=True, slots=True)
class Case:
    """A machine and a method, with the chance planted for each position that its draft is accepted."""

    name: str
    calibration: str
    method: Method
    accepted: tuple[float, ...]


MACHINES = {
    "8B, H100": "llama-3.1-8b-h100",
    "8B, GH200 (knee)": "llama-3.1-8b-gh200",
    "70B, 2x H200": "llama-3-70b-2xh200",
    "mixture of experts": "qwen3-30b-a3b",
}
CASES = tuple(
    Case(f"{machine}, {method}, {how}", calibration, method, accepted)
    for machine, calibration in MACHINES.items()
    for method in (Method.EAGLE3, Method.DRAFT_MODEL)
    for how, accepted in (("low", LOW), ("fading", FADING), ("good", GOOD))
)


class Planted(Replica):
    """A replica with a planted acceptance."""

    rates: tuple[float, ...] = ()

    def profile(self, kind: str, temperature: float) -> DraftProfile:
        """See `Replica.profile`."""
        return DraftProfile(self.rates, request_spread=SPREAD)


def engine(case: Case, k: int, batch: int, seed: int) -> Fleet:
    """Return an engine that may draft 8 tokens and drafts k, and whose batch is limited."""
    config = {"num_speculative_tokens": LONGEST_K, "num_speculative_tokens_per_batch_size": [[1, 1, k]]}
    calibration = load_calibration(case.calibration)
    parameters = EngineParameters.of(calibration, case.method, config, max_num_seqs=batch)
    replica = Planted("a", calibration, case.method, config, parameters=replace(parameters, kv_blocks=1 << 16))
    replica.rates = case.accepted
    return Fleet([replica], seed)


def lengths(count: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield the tokens of prompts and outputs."""
    rng = np.random.default_rng(seed)
    yield from zip(rng.integers(100, 700, count).tolist(), rng.integers(100, 300, count).tolist(), strict=True)


def tokens_per_s(case: Case, k: int, batch: int, requests: int, seed: int) -> float:
    """Return the output tokens per second while the batch is full."""
    count = max(requests, 6 * batch)
    fleet = engine(case, k, batch, seed)
    for prompt, output in lengths(count, seed):
        fleet.submit(0, prompt, output, 0.0)
    done = fleet.advance(math.inf)
    first_s, ended_s = (np.array([getattr(one, name) for one in done]) for name in ("first_s", "ended_s"))
    tokens = np.array([one.output_tokens for one in done])
    begin_s, end_s = np.sort(ended_s)[batch], first_s.max()  # the first batch has left; the last request has come in
    within = np.clip(np.minimum(ended_s, end_s) - np.maximum(first_s, begin_s), 0.0, None) / (ended_s - first_s)
    return float((tokens * within).sum() / (end_s - begin_s))


def recorded(case: Case, count: int, seed: int) -> list[ReplayRequest]:
    """Return requests with the steps that they take, as a trace has them."""
    fleet = engine(case, LONGEST_K, 1, seed)
    return [
        replay_request(
            TraceRecord(
                prompt_tokens=prompt,
                output_tokens=output,
                acceptance={case.method.value: fleet.script(number, 0, output, "chat", 0.0).emitted.tolist()},
            ),
            0.0,
            0.0,
        )
        for number, (prompt, output) in enumerate(lengths(count, seed))
    ]


def counted(case: Case, count: int, seed: int) -> tuple[float, ...]:
    """Return the tokens per step that an engine counts."""
    fleet = engine(case, LONGEST_K, 16, seed)
    for prompt, output in lengths(count, seed):
        fleet.submit(0, prompt, output, 0.0)
    fleet.advance(math.inf)
    counters = fleet.counters()
    return tuple(np.cumsum([1.0, *(counters.accepted_at / counters.drafts)]).round(12).tolist())


@dataclass(frozen=True, slots=True)
class Result:
    """The best k and the chosen one by batch size, and the share of the throughput that the choice loses."""

    best: Sequence[int]
    chosen: Sequence[int]
    lost: Sequence[float]

    @property
    def furthest(self) -> int:
        """The largest difference of k."""
        return max(abs(one - other) for one, other in zip(self.best, self.chosen, strict=True))


def measure(case: Case, requests: int, seed: int, batches: Sequence[int] = BATCHES) -> dict[str, Result]:
    """Return the results of schedules from a trace and from counters."""
    table = np.array(
        [[tokens_per_s(case, k, batch, requests, seed) for k in range(LONGEST_K + 1)] for batch in batches]
    )
    others = recorded(case, requests, seed + 1)
    calibration, config = load_calibration(case.calibration), {"num_speculative_tokens": LONGEST_K}
    known = {
        "trace": tokens_per_step(calibration, case.method, config, others),
        "counters": counted(case, requests, seed + 1),
    }
    results = {}
    for source, drafts in known.items():
        context_tokens = mean_context_tokens(others)
        ranges = best_schedule(calibration, case.method, config, drafts, context_tokens, max(batches))
        chosen = [next((k for first, last, k in ranges if first <= batch <= last), LONGEST_K) for batch in batches]
        lost = 1.0 - table[np.arange(len(batches)), chosen] / table.max(axis=1)
        results[source] = Result(table.argmax(axis=1).tolist(), chosen, lost.tolist())
    return results


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=400, help="requests for each batch size, at least")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print("| case | best k | from a trace | furthest | lost at most | from counters | furthest | lost at most |")
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        results = measure(case, arguments.requests, arguments.seed)
        best = " ".join(map(str, results["trace"].best))
        columns = [
            f"{' '.join(map(str, one.chosen))} | {one.furthest} | {max(one.lost):.1%}" for one in results.values()
        ]
        print(f"| {case.name} | {best} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
