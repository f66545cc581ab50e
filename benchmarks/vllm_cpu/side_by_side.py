"""`vllm bench serve` and `gateway bench` on the same gateway, the same engine and the same prompts, in turns."""

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
from benchmarks.vllm_cpu.quiet import AT_ONCE, Clock

TOKENIZER = ".cache/tiny-models/target"
START_S = 300.0
OUTPUT_TOKENS = 128
SKIPPED_PIECES = 900  # what `measure` sends; these prompts are others
TIMES = ("ttft", "tpot", "itl")


@dataclass(frozen=True, slots=True)
class Told:
    """What a tool says of one run; times are (median, 99th percentile) in ms."""

    tokens_per_s: float
    completed: int
    times: dict[str, tuple[float, float]]
    foreign_share: float


def side_by_side(backend: str, concurrency: int, requests: int, rounds: int) -> tuple[list[Told], list[Told]]:
    """Run both tools in turns; return what `vllm bench serve` and what `gateway bench` say, run by run.

    The gateway has one replica, of the pool file, without prefix caching: the second to ask has no advantage. Tools
    and gateway, not the engine, run at real-time priority: see `quiet.run_at_once`.
    """
    theirs: list[Told] = []
    ours: list[Told] = []
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as name, gateway(backend, Path(name)) as url:
        for turn in range(rounds):
            prompts = Path(name) / f"{turn}.json"
            write_prompts(prompts, SKIPPED_PIECES + turn * requests, requests)
            load = (url, backend, prompts, concurrency, requests)
            for into, run in [(theirs, vllm_bench), (ours, gateway_bench)][:: 1 if turn % 2 == 0 else -1]:
                into.append(run(*load))
                print(run.__name__, into[-1], file=sys.stderr, flush=True)
    return theirs, ours


def write_prompts(path: Path, skip: int, count: int) -> None:
    """Write prompts in ShareGPT's format, which both tools read; what stands there as the answer is not looked at."""
    chosen = itertools.islice(pieces(), skip, skip + count)
    turns = [[{"from": "human", "value": text}, {"from": "gpt", "value": text}] for text, _ in chosen]
    path.write_text(json.dumps([{"conversations": turn} for turn in turns]), encoding="utf-8")


@contextlib.contextmanager
def gateway(backend: str, folder: Path) -> Iterator[str]:
    """Start the gateway's command with one replica of the pool file, yield its address, and end it."""
    document: dict[str, Any] = yaml.safe_load(POOL.read_text(encoding="utf-8"))
    model = document["models"]["tiny"]
    model["backends"] = {backend: model["backends"][backend]}
    model["backends"][backend]["serve"]["flags"].append("--no-enable-prefix-caching")
    with serving(document, folder / "pool.yaml", _answers, START_S, AT_ONCE) as url:
        yield url


def _answers(url: str) -> bool:
    body = {"model": "tiny", "prompt": "def", "max_tokens": 32, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False).status_code == 200


def vllm_bench(url: str, backend: str, prompts: Path, concurrency: int, requests: int) -> Told:
    """Run `vllm bench serve` and read its result."""
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
    told = json.loads(result.read_text())
    times = {name: (told[f"median_{name}_ms"], told[f"p99_{name}_ms"]) for name in TIMES}
    return Told(told["output_throughput"], told["completed"], times, foreign)


def gateway_bench(url: str, backend: str, prompts: Path, concurrency: int, requests: int) -> Told:
    """Run `gateway bench` and read its result."""
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
    told = json.loads(result.read_text())["runs"][0]
    times = {name: (told[name]["p50"], told[name]["p99"]) for name in TIMES}
    return Told(told["output_tokens_per_s"], told["completed"], times, foreign)


def _run(command: Sequence[str]) -> float:
    """Run a command to its end and return what others took of the machine meanwhile.

    Raises
    ------
    RuntimeError
        If it fails; the message ends with what it printed.
    """
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    before = Clock.now()
    done = subprocess.run(
        [*AT_ONCE, *command],
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


def table(theirs: Sequence[Told], ours: Sequence[Told]) -> Iterator[str]:
    """Yield the lines of a table: medians over the runs, and in brackets their range."""
    yield "| | vllm bench serve | gateway bench | difference |"
    yield "|---|---|---|---|"
    rows = {"output tokens/s": [[one.tokens_per_s for one in told] for told in (theirs, ours)]}
    for name, (place, label) in itertools.product(TIMES, enumerate(("median", "p99"))):
        rows[f"{name.upper()} {label}, ms"] = [[one.times[name][place] for one in told] for told in (theirs, ours)]
    for name, (their, our) in rows.items():
        difference = float(np.median(our) / np.median(their) - 1)
        yield f"| {name} | {_shown(their)} | {_shown(our)} | {difference:+.0%} |"


def _shown(values: Sequence[float]) -> str:
    digits = 0 if min(values) >= 100 else 1 if min(values) >= 10 else 2
    return f"{np.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
