"""When a chunk of a stream stands for more than one step of a real engine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import httpx

from backends.engine_metrics import EngineMetrics, read_metrics
from backends.speculation import Method
from benchmarks.vllm_cpu.engines import running
from benchmarks.vllm_cpu.load import closed_loop
from benchmarks.vllm_cpu.prompts import pieces

_ANSWERS = 3  # of each stream
_TOKENS = 100


@dataclass(frozen=True, slots=True)
class Load:
    """Streams at a time, and what their chunks and the counters of the engine say of a step."""

    streams: int
    tokens_per_chunk: float
    tokens_per_step: float


async def measure(method: Method, streams: Sequence[int], busy: int) -> list[Load]:
    """Measure the engine of a method with so many streams at a time, beside so many processes that compute."""
    measured = []
    async with running(method) as url:
        texts = pieces()
        await closed_loop(url, _prompts(texts, 16), 16)  # compiles what the first requests need
        for at_a_time in streams:
            before = await _counters(url)
            with _computing(busy):
                played = await closed_loop(url, _prompts(texts, _ANSWERS * at_a_time), at_a_time)
            after = await _counters(url)
            chunks = sum(len(answer.chunk_tokens) for answer in played.answers)
            tokens = sum(len(answer.output_ids) for answer in played.answers)
            assert after.steps is not None
            assert before.steps is not None
            steps = after.steps - before.steps
            per_step = (after.generation_tokens - before.generation_tokens) / steps
            measured.append(Load(at_a_time, tokens / chunks, per_step))
    return measured


@contextlib.contextmanager
def _computing(processes: int) -> Iterator[None]:
    """Run processes that do nothing but take a core each."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def _prompts(texts: Iterator[tuple[str, int]], count: int) -> list[tuple[str, int]]:
    return [(text, _TOKENS) for text, _ in islice(texts, count)]


async def _counters(url: str) -> EngineMetrics:
    async with httpx.AsyncClient(trust_env=False) as client:
        metrics = read_metrics((await client.get(f"{url}/metrics")).content)
    assert metrics is not None
    return metrics


def table(measured: Sequence[Load]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield "| streams | tokens per chunk | tokens per step | steps per chunk |"
    yield "|---|---|---|---|"
    for load in measured:
        figures = load.tokens_per_chunk, load.tokens_per_step, load.tokens_per_chunk / load.tokens_per_step
        yield f"| {load.streams} | {' | '.join(f'{figure:.3f}' for figure in figures)} |"
