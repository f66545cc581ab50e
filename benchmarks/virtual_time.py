"""Measure how fast a fleet plays a trace in virtual time: `python -m benchmarks.virtual_time TRACE.csv[.gz]`.

TRACE has the columns TIMESTAMP, ContextTokens and GeneratedTokens of the Azure LLM inference traces
(github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace_conv.csv of 2023; not part of the project). Longer
workloads are made from it: pairs of lengths are drawn from it at random, its gaps are repeated in order and scaled to
the load. Each row runs in a process of its own; its seconds are CPU time (user and system), including reading the trace
and the policy.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from backends.calibration.calibration import load_calibration
from backends.simulator.engine.fleet import Fleet, Replica, load_rules
from backends.simulator.engine.virtual_time import Arrival, run_fleet
from backends.speculation import Method
from policies.features.request import Endpoint, RequestFeatures
from policies.policy import policies

MIXED: tuple[tuple[Method, dict[str, Any]], ...] = (
    (Method.BASELINE, {}),
    (Method.NGRAM, {"num_speculative_tokens": 5, "prompt_lookup_max": 4}),
    (Method.SUFFIX, {}),
    (Method.EAGLE, {"num_speculative_tokens": 3}),
    (Method.EAGLE3, {"num_speculative_tokens": 3}),
    (Method.DRAFT_MODEL, {"num_speculative_tokens": 5}),
)
CHUNK = 10_000
MILLION = 1_000_000
Row = tuple[int, int, str, float]  # requests, replicas, pool, requests per second and replica
ROWS: tuple[Row, ...] = (
    (10_000, 8, "mixed", 8.0),
    (100_000, 8, "mixed", 8.0),
    (MILLION, 8, "mixed", 8.0),
    (MILLION, 8, "baseline", 8.0),
    (MILLION, 8, "mixed", 14.0),
    (100_000, 1, "mixed", 8.0),
    (100_000, 4, "mixed", 8.0),
    (100_000, 32, "mixed", 8.0),
    (MILLION, 32, "mixed", 8.0),
)
"""Mixed: all methods in turn."""


def read_trace(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return prompt and output tokens, shape (requests, 2), and the seconds between arrivals, shape (requests - 1,)."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = list(csv.DictReader(text.decode().splitlines()))
    lengths = np.array([[int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"]))] for row in rows])
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    return lengths, np.maximum(0.0, np.diff(times))


def arrivals(path: Path, requests: int, rate: float, seed: int) -> Iterator[Arrival]:
    """Yield requests at an average of `rate` per second."""
    lengths, gaps_s = read_trace(path)
    gaps_s = gaps_s / gaps_s.mean() / rate
    rng = np.random.default_rng(seed)
    now_s = 0.0
    for start in range(0, requests, CHUNK):
        count = min(CHUNK, requests - start)
        drawn = lengths[rng.integers(0, len(lengths), count)].tolist()
        times = now_s + np.cumsum(np.take(gaps_s, range(start, start + count), mode="wrap"))
        now_s = float(times[-1])
        for arrived_s, (prompt, output) in zip(times.tolist(), drawn, strict=True):
            yield Arrival(arrived_s, prompt, output)


def measure(path: Path, requests: int, count: int, pool: str, rate: float) -> dict[str, float]:
    """Play a trace with `least_loaded`, and return its figures."""
    calibration = load_calibration("llama-3.1-8b-h100")
    methods = MIXED if pool == "mixed" else tuple(entry for entry in MIXED if entry[0] == pool)

    def build() -> Fleet:
        chosen = [methods[number % len(methods)] for number in range(count)]
        return Fleet([Replica(f"r{number}", calibration, *how) for number, how in enumerate(chosen)], seed=1)

    load_s = time.process_time()
    load_rules(Replica("a", calibration, Method.BASELINE))
    load_s = time.process_time() - load_s

    fleet = build()
    by_name = {replica.name: number for number, replica in enumerate(fleet.replicas)}
    entry = policies()["least_loaded"]
    policy = entry(entry.Settings.model_validate({"seed": 1}))

    def choose(arrival: Arrival) -> int:
        request = RequestFeatures("m", Endpoint.CHAT, prompt_tokens=arrival.prompt_tokens)
        return by_name[policy.choose(request, fleet.replicas).backend]

    cpu_s = time.process_time()
    timeline = run_fleet(fleet, arrivals(path, requests, rate * count, seed=1), choose)
    cpu_s = time.process_time() - cpu_s
    assert not np.isnan(timeline.e2e_s).any()
    return {
        "load_s": load_s,
        "cpu_s": cpu_s,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "requests_per_s": len(timeline.e2e_s) / cpu_s,
        "output_tokens": float(timeline.output_tokens.sum()),
        "virtual_s": timeline.duration_s,
        "in_flight": float(timeline.e2e_s.sum() / timeline.duration_s / count),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--one", nargs=4, metavar=("REQUESTS", "REPLICAS", "POOL", "RATE"), help="one row, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        requests, replicas, pool, rate = arguments.one
        print(json.dumps(measure(arguments.trace, int(requests), int(replicas), pool, float(rate))))
        return
    heads = (
        "requests",
        "replicas",
        "pool",
        "requests/s each",
        "in flight each",
        "CPU s",
        "requests/CPU s",
        "M tokens/CPU s",
    )
    print(f"| {' | '.join(heads)} | peak MiB |\n{'|---' * (len(heads) + 1)}|")
    for row in ROWS:
        figures = _in_process([str(arguments.trace), "--one", *map(str, row)])
        print(
            f"| {row[0]:,} | {row[1]} | {row[2]} | {row[3]:g} | {figures['in_flight']:.0f} "
            f"| {figures['cpu_s']:.1f} | {figures['requests_per_s']:,.0f} "
            f"| {figures['output_tokens'] / figures['cpu_s'] / 1e6:.1f} | {figures['rss_mib']:.0f} |",
            flush=True,
        )
        print(f"loading compiled code: {figures['load_s']:.2f} CPU s", file=sys.stderr)


def _in_process(arguments: Sequence[str]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.virtual_time", *arguments], capture_output=True, text=True, check=True
    )
    read: Callable[[str], dict[str, float]] = json.loads
    return read(done.stdout)


if __name__ == "__main__":
    main()
