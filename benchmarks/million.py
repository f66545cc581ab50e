"""Measure the lab commands on a million requests: `python -m benchmarks.million make FOLDER TRACE` and `... run TRACE`.

`make` writes a trace in the recorder's format. FOLDER has the two Azure LLM inference traces of 2023 (CC-BY 4.0,
github.com/Azure/AzurePublicDataset, `AzureLLMInferenceTrace_conv.csv` and `..._code.csv`, packed or not; not part of
the project). Each trace is repeated, with arrivals shifted by up to half a second and lengths by up to a tenth, until
both together have as many requests as asked for; they are played three times as fast as recorded. The repetitions are
thus as bursty as the trace. Applications (templates with their temperatures), backends and outcomes are drawn at
random. The same seed makes the same trace.

`run` runs `gateway replay` and `gateway tune` on it, one after another, and prints for each the
wall time, the CPU time and the peak memory of its whole process tree.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.overhead.process import rss_mb, tree
from lab.replay.command import pool_of, served_model
from lab.replay.simulate import ReplicaSpec
from lab.trace.read import read_trace
from lab.trace.record import TraceCandidate, TraceRecord
from lab.trace.write import write_trace

Floats = npt.NDArray[np.float64]

MODEL = "llama-3.1-8b"
SPEED = 3.0
JITTER_S, JITTER = 0.5, 0.1
EPOCH_S = 1_700_000_000.0
APPLICATIONS = {
    "chat": (("9f1c00a1", 0.7), ("9f1c00a2", 1.0), ("9f1c00a3", 0.0), ("9f1c00a4", 0.3)),
    "code": (("c0de00b1", 0.0), ("c0de00b2", 0.2), ("c0de00b3", 0.8)),
}
"""Templates and their temperatures, by workload; the first template is drawn most often."""

POLICIES = ("round_robin", "least_loaded", "thresholds", "learned")
SAMPLED_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in order of arrival, in columns of shape (requests,); `kind` and `application` are indexes."""

    arrived_s: Floats
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    kind: npt.NDArray[np.int64]
    application: npt.NDArray[np.int64]


def repeated(path: Path, seconds: float, rng: np.random.Generator) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return arrivals and lengths of a trace repeated for `seconds`; shapes (requests,) and (requests, 2)."""
    records = list(read_trace(path, in_order=True))
    own = np.array([record.arrived_at or 0.0 for record in records])
    own -= own[0]
    lengths = np.array([[record.prompt_tokens, record.output_tokens or 1] for record in records])
    period_s = own[-1] + own[-1] / (len(own) - 1)
    times, sizes = [], []
    for number in range(int(np.ceil(seconds / period_s))):
        moved = own + number * period_s + rng.uniform(-JITTER_S, JITTER_S, len(own))
        times.append(np.maximum(0.0, moved))
        sizes.append(np.maximum(1, np.rint(lengths * rng.uniform(1 - JITTER, 1 + JITTER, lengths.shape))).astype(int))
    arrived, size = np.concatenate(times), np.concatenate(sizes)
    order = np.argsort(arrived, kind="stable")
    return arrived[order], size[order]


def traffic(folder: Path, requests: int, seed: int) -> Traffic:
    """Return the first `requests` requests of both repeated traces together."""
    rng = np.random.default_rng(seed)
    sources = []
    for word in ("conv", "code"):
        (path,) = folder.glob(f"AzureLLMInferenceTrace_{word}.csv*")
        sources.append(path)
    per_s = sum(_rate(path) for path in sources)
    seconds = 1.05 * requests / per_s  # slightly more than needed
    parts = [repeated(path, seconds, rng) for path in sources]
    times = np.concatenate([arrived for arrived, _ in parts])
    kind = np.concatenate([np.full(len(arrived), index) for index, (arrived, _) in enumerate(parts)])
    order = np.argsort(times, kind="stable")[:requests]
    lengths = np.concatenate([sizes for _, sizes in parts])[order]
    kind = kind[order]
    application = np.empty(len(order), np.int64)
    for index, templates in enumerate(APPLICATIONS.values()):
        weights = 1.0 / np.arange(1, len(templates) + 1)
        of_kind = kind == index
        application[of_kind] = rng.choice(len(templates), int(of_kind.sum()), p=weights / weights.sum())
    return Traffic(times[order] / SPEED, lengths[:, 0], lengths[:, 1], kind, application)


def _rate(path: Path) -> float:
    times = [record.arrived_at or 0.0 for record in read_trace(path, in_order=True)]
    return (len(times) - 1) / (times[-1] - times[0])


def described(requests: Traffic) -> Iterator[TraceRecord]:
    """Yield what is known of each request on arrival."""
    kinds = list(APPLICATIONS.items())
    columns = (requests.arrived_s, requests.prompt_tokens, requests.output_tokens, requests.kind, requests.application)
    for number, (at_s, prompt, output, kind, application) in enumerate(
        zip(*map(np.ndarray.tolist, columns), strict=True)
    ):
        workload, templates = kinds[kind]
        template, temperature = templates[application]
        yield TraceRecord(
            id=f"{number:07x}",
            arrived_at=EPOCH_S + at_s,
            model=MODEL,
            endpoint="chat",
            key="benchmark",
            template=template,
            workload=workload,
            temperature=temperature,
            top_p=1.0,
            max_tokens=1 << (output + 32).bit_length(),
            stream=True,
            prompt_tokens=prompt,
            output_tokens=output,
            turns=1,
            overlap=round((number * 0.618034) % 1.0 * (0.6 if kind else 0.2), 3),
            code_share=0.7 if kind else 0.0,
            structured=False,
            tools=False,
        )


def logged(arrivals: Traffic, pool: Sequence[ReplicaSpec], seed: int, intervals: int) -> Iterator[TraceRecord]:
    """Yield each request with an outcome on one of the replicas: as long as a recorder's line, but drawn."""
    rng, even = np.random.default_rng(seed), 1.0 / len(pool)
    for record in described(arrivals):
        backend = pool[int(rng.integers(len(pool)))]
        busy = rng.integers(0, 30, len(pool)).tolist()
        gaps = min(intervals, record.output_tokens - 1 if record.output_tokens else 0)
        itl_s = rng.lognormal(-4.0, 0.3, gaps).round(6).tolist()
        yield replace(
            record,
            policy="random",
            reason="drawn",
            backend=backend.name,
            method=backend.method.value,
            propensity=even,
            candidates=[TraceCandidate(spec.name, None, even, count) for spec, count in zip(pool, busy, strict=True)],
            in_flight=sum(busy),
            status=200,
            ttft_s=0.05,
            itl=itl_s,
            e2e_s=round(0.05 + sum(itl_s), 6),
        )


def make(folder: Path, trace: Path, config: Path, requests: int, seed: int, intervals: int) -> None:
    """Write the trace and print its size."""
    pool = pool_of(served_model(config, None)[1], None)
    arrivals = traffic(folder, requests, seed)
    written, _ = write_trace(trace, logged(arrivals, pool, seed, intervals))
    size_mb = trace.stat().st_size / 1e6
    hours = float(np.ptp(arrivals.arrived_s)) / 3600
    print(f"{written:,} requests of {hours:.1f} hours, {written / hours / 3600:.1f} per second; {size_mb:,.0f} MB")


def commands(trace: Path, config: Path, work: Path) -> dict[str, list[str]]:
    """Return the measured commands by name."""
    gateway = [sys.executable, "-m", "gateway"]
    chosen = [word for name in POLICIES for word in ("--policy", name)]
    return {
        "replay": [
            *gateway, "replay", str(trace), "--config", str(config), *chosen, "--json", str(work / "replay.json"),
        ],
        "tune": [
            *gateway, "tune", str(trace), "--config", str(config), "--out", str(work / "rules.yaml"), "--json",
            str(work / "tune.json"),
        ],
    }  # fmt: skip


def run(trace: Path, config: Path, work: Path, only: Sequence[str]) -> None:
    """Run the commands and print what each took."""
    work.mkdir(parents=True, exist_ok=True)
    rows = ["| command | wall, s | CPU, s | peak RSS of all processes, MB | load before |\n|---|---|---|---|---|"]
    walls_s = []
    for name, argv in commands(trace, config, work).items():
        if only and name not in only:
            continue
        print("$ gateway " + shlex.join(argv[3:]), flush=True)
        load = os.getloadavg()[0]
        wall_s, cpu_s, peak_mb = _measured(argv)
        walls_s.append(wall_s)
        rows.append(f"| {name} | {wall_s:.0f} | {cpu_s:.0f} | {peak_mb:,.0f} | {load:.1f} |")
        print(rows[-1], end="\n\n", flush=True)
    print("\n".join(rows) + f"\n| sum | {sum(walls_s):.0f} | | | |")


def _measured(argv: Sequence[str]) -> tuple[float, float, float]:
    """Run a command; return its wall seconds, CPU seconds and peak memory in MB, children included.

    Memory shared by several processes is counted in each of them.
    """
    before, began = os.times(), time.monotonic()
    process = subprocess.Popen(argv)
    peak_mb = 0.0
    while process.poll() is None:
        peak_mb = max(peak_mb, rss_mb(tree(process.pid)))
        time.sleep(SAMPLED_EVERY_S)
    wall_s, after = time.monotonic() - began, os.times()
    if process.returncode != 0:
        raise SystemExit(f"exit status {process.returncode}")
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return wall_s, used, peak_mb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("config/pool.yaml"))
    parts = parser.add_subparsers(dest="part", required=True)
    making = parts.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("trace", type=Path)
    making.add_argument("--requests", type=int, default=1_000_000)
    making.add_argument("--intervals", type=int, default=20, help="largest number of inter-chunk times in a record")
    making.add_argument("--seed", type=int, default=0)
    running = parts.add_parser("run")
    running.add_argument("trace", type=Path)
    running.add_argument("--work", type=Path, default=Path("/tmp/million"))
    running.add_argument("--only", action="append", choices=("replay", "tune"))
    arguments = parser.parse_args()
    if arguments.part == "make":
        make(
            arguments.folder, arguments.trace, arguments.config, arguments.requests, arguments.seed, arguments.intervals
        )
    else:
        run(arguments.trace, arguments.config, arguments.work, arguments.only or ())


if __name__ == "__main__":
    main()
