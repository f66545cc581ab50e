"""`vllm bench serve` and `gateway bench` on the same gateway, engine and prompts, in turn."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from benchmarks.vllm_cpu.command import ROOT, serving
from benchmarks.vllm_cpu.engines import POOL
from benchmarks.vllm_cpu.prompts import pieces
from benchmarks.vllm_cpu.quiet import REAL_TIME, Clock

TOKENIZER = ".cache/tiny-models/target"
START_S = 300.0
OUTPUT_TOKENS = 128
SKIPPED_PIECES = 900  # used by `measure`; these prompts differ
TIMES = ("ttft", "tpot", "itl")


@dataclass(frozen=True, slots=True)
class Result:
    """The results that a tool reports for one run; times are (median, 99th percentile) in ms."""

    tokens_per_s: float
    completed: int
    times: dict[str, tuple[float, float]]
    foreign_share: float


def side_by_side(backend: str, concurrency: int, requests: int, rounds: int) -> tuple[list[Result], list[Result]]:
    """Run both tools in turn; return the results of `vllm bench serve` and of `gateway bench`, run by run.

    The gateway has one replica of the pool file, without prefix caching, so that the second tool has no advantage.
    Tools and gateway, but not the engine, run at real-time priority: see `quiet.run_in_real_time`.
    """
    theirs: list[Result] = []
    ours: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as name, gateway(backend, Path(name)) as url:
        for turn in range(rounds):
            prompts = Path(name) / f"{turn}.json"
            write_prompts(prompts, SKIPPED_PIECES + turn * requests, requests)
            load = (url, backend, prompts, concurrency, requests)
            for results, run in [(theirs, vllm_bench), (ours, gateway_bench)][:: 1 if turn % 2 == 0 else -1]:
                results.append(run(*load))
                print(run.__name__, results[-1], file=sys.stderr, flush=True)
    return theirs, ours


def write_prompts(path: Path, skip: int, count: int) -> None:
    """Write prompts in ShareGPT's format, which both tools read; they ignore the answers in it."""
    chosen = itertools.islice(pieces(), skip, skip + count)
    turns = [[{"from": "human", "value": text}, {"from": "gpt", "value": text}] for text, _ in chosen]
    path.write_text(json.dumps([{"conversations": turn} for turn in turns]), encoding="utf-8")


@contextlib.contextmanager
def gateway(backend: str, folder: Path) -> Iterator[str]:
    """Start the gateway's command with one replica of the pool file, yield its URL, and stop it at the end."""
    document: dict[str, Any] = yaml.safe_load(POOL.read_text(encoding="utf-8"))
    model = document["models"]["tiny"]
    model["backends"] = {backend: model["backends"][backend]}
    model["backends"][backend]["serve"]["flags"].append("--no-enable-prefix-caching")
    with serving(document, folder / "pool.yaml", _answers, START_S, REAL_TIME) as url:
        yield url


def _answers(url: str) -> bool:
    body = {"model": "tiny", "prompt": "def", "max_tokens": 32, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False).status_code == 200


def vllm_bench(url: str, backend: str, prompts: Path, concurrency: int, requests: int) -> Result:
    """Run `vllm bench serve` and return its results."""
    result = prompts.with_suffix(".theirs.json")
    options = {
        "--backend": "openai",
        "--base-url": url,
        "--endpoint": "/v1/completions",
        "--model": "tiny",
        "--tokenizer": TOKENIZER,
        "--header": f"x-gateway-backend={backend}",
        "--dataset-name": "sharegpt",
        "--dataset-path": str(prompts),
        "--sharegpt-output-len": str(OUTPUT_TOKENS),
        "--num-prompts": str(requests),
        "--max-concurrency": str(concurrency),
        "--num-warmups": "8",
        "--temperature": "0",
        "--percentile-metrics": ",".join(TIMES),
        "--metric-percentiles": "50,99",
        "--result-dir": str(result.parent),
        "--result-filename": result.name,
    }
    flags = ["--ignore-eos", "--save-result", "--disable-tqdm"]
    foreign = _run([".venv-vllm/bin/vllm", "bench", "serve", *itertools.chain(*options.items()), *flags])
    report = json.loads(result.read_text())
    times = {name: (report[f"median_{name}_ms"], report[f"p99_{name}_ms"]) for name in TIMES}
    return Result(report["output_throughput"], report["completed"], times, foreign)


def gateway_bench(url: str, backend: str, prompts: Path, concurrency: int, requests: int) -> Result:
    """Run `gateway bench` and return its results."""
    result = prompts.with_suffix(".ours.json")
    options = {
        "--url": url,
        "--endpoint": "completions",
        "--model": "tiny",
        "--header": f"x-gateway-backend:{backend}",
        "--dataset": str(prompts),
        "--tokenizer": TOKENIZER,
        "--output-tokens": str(OUTPUT_TOKENS),
        "--num-requests": str(requests),
        "--concurrency": str(concurrency),
        "--warmup": "8",
        "--temperature": "0",
        "--json": str(result),
    }
    command = str(Path(sys.executable).with_name("gateway"))
    foreign = _run([command, "bench", *itertools.chain(*options.items()), "--ignore-eos"])
    report = json.loads(result.read_text())["runs"][0]
    times = {name: (report[name]["p50"], report[name]["p99"]) for name in TIMES}
    return Result(report["output_tokens_per_s"], report["completed"], times, foreign)


def _run(command: Sequence[str]) -> float:
    """Run a command and return the CPU use of other processes meanwhile.

    Raises
    ------
    RuntimeError
        If the command fails; the message ends with its output.
    """
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    before = Clock.now()
    done = subprocess.run(
        [*REAL_TIME, *command],
        cwd=ROOT,
        env={**os.environ, **quiet},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return before.foreign_share(Clock.now())


def table(theirs: Sequence[Result], ours: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of a table: medians over the runs, with their range in parentheses."""
    yield "| | vllm bench serve | gateway bench | difference |"
    yield "|---|---|---|---|"
    rows = {"output tokens/s": [[run.tokens_per_s for run in runs] for runs in (theirs, ours)]}
    for name, (index, label) in itertools.product(TIMES, enumerate(("median", "p99"))):
        rows[f"{name.upper()} {label}, ms"] = [[run.times[name][index] for run in runs] for runs in (theirs, ours)]
    for name, (their, our) in rows.items():
        difference = float(np.median(our) / np.median(their) - 1)
        yield f"| {name} | {_shown(their)} | {_shown(our)} | {difference:+.0%} |"


def _shown(values: Sequence[float]) -> str:
    digits = 0 if min(values) >= 100 else 1 if min(values) >= 10 else 2
    return f"{np.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
