"""Measurement of each method's engine in turn, warmed up, in closed loops, with the results in one file."""

from __future__ import annotations

import itertools
import lzma
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from backends.speculation import Method
from benchmarks.vllm_cpu.engines import running
from benchmarks.vllm_cpu.load import Answer, closed_loop
from benchmarks.vllm_cpu.prompts import pieces
from benchmarks.vllm_cpu.quiet import Clock, until_load_below, until_quiet

CONCURRENCIES = (1, 2, 4, 8, 16)
WARM_UP = 24
ROUNDS = 3
QUIET_LOAD_AVERAGE, LOAD_WAIT_S = 0.5, 300.0
QUIET_SHARE, QUIET_WAIT_S = 0.05, 10.0
"""What is waited for, and how long: a load average before an engine, and other CPU use before a cell."""
WARM_UP_TURN = -1


@dataclass(frozen=True, slots=True)
class Cell:
    """One closed loop.

    Parameters
    ----------
    turn
        Round of the loop; negative: not compared.
    cpu_share
        CPU time of the load generator, in shares of one core.
    engine_load_average
        The machine's one-minute load average when the engine was started.
    foreign_share
        CPU time of other processes during the loop, in shares of one core.
    """

    method: Method
    concurrency: int
    turn: int
    duration_s: float
    cpu_share: float
    engine_load_average: float
    foreign_share: float
    answers: list[Answer]


def requests_of(concurrency: int) -> int:
    """Return the number of requests of a cell: enough for a few seconds."""
    return max(24, 6 * concurrency)


async def measure(method: Method) -> list[Cell]:
    """Measure one method: warm-up, and each concurrency once per round.

    Every method gets the same prompts in the same order; all prompts differ.
    """
    cells: list[Cell] = []
    prompts = pieces()
    load_average = await until_load_below(QUIET_LOAD_AVERAGE, LOAD_WAIT_S)
    async with running(method) as url:

        async def cell(requests: Sequence[tuple[str, int]], concurrency: int, turn: int) -> None:
            if turn >= 0:
                await until_quiet(QUIET_SHARE, QUIET_WAIT_S)
            before = Clock.now()
            played = await closed_loop(url, requests, concurrency)
            foreign = before.foreign_share(Clock.now())
            print(f"{method} {concurrency:2} turn {turn}: {played.duration_s:.1f} s, others {foreign:.2f}", flush=True)
            shares = played.duration_s, played.cpu_share, load_average, foreign
            cells.append(Cell(method, concurrency, turn, *shares, played.answers))

        for concurrency in (1, 4, 16):
            await cell(list(itertools.islice(prompts, WARM_UP)), concurrency, WARM_UP_TURN)
        for turn in range(ROUNDS):
            for concurrency in CONCURRENCIES:
                await cell(list(itertools.islice(prompts, requests_of(concurrency))), concurrency, turn)
    return cells


def write(path: Path, cells: Sequence[Cell]) -> None:
    """Write cells as JSON compressed with xz, with times rounded to 0.1 ms."""
    plain = [asdict(cell) for cell in cells]
    for cell in plain:
        for answer in cell["answers"]:
            answer["sent_s"] = round(answer["sent_s"], 4)
            answer["chunks_s"] = [round(at_s, 4) for at_s in answer["chunks_s"]]
    path.write_bytes(lzma.compress(orjson.dumps(plain)))


def read(path: Path) -> list[Cell]:
    """Return the cells of a file that `write` wrote."""
    plain = orjson.loads(lzma.decompress(path.read_bytes()))
    return [
        Cell(**{**cell, "method": Method(cell["method"]), "answers": [Answer(**answer) for answer in cell["answers"]]})
        for cell in plain
    ]
