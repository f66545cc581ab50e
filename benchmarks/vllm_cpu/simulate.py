"""Simulation of the measured closed loops in virtual time: the recorded prompts and answers, in the order sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backends.calibration.calibration import Calibration
from backends.drafting.script import Script
from backends.simulator.drafting.proposers import Proposer
from backends.simulator.engine.fleet import Fleet, SimulatedReplica
from backends.speculation import Method
from benchmarks.virtual_time import run_closed_loop
from benchmarks.vllm_cpu.engines import speculative_config
from benchmarks.vllm_cpu.load import Answer
from benchmarks.vllm_cpu.measure import Cell

DISTURBED_SHARE = 0.15
Scripts = list[tuple[Cell, list[Script]]]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a closed loop.

    Parameters
    ----------
    tokens_per_s
        Output tokens per second from the first request to the last token.
    tpot_ms, ttft_ms
        Medians over requests.
    """

    tokens_per_s: float
    tpot_ms: float
    ttft_ms: float


def measured(cell: Cell) -> Figures:
    """Return the figures of a real engine."""
    tokens = sum(len(answer.output_ids) for answer in cell.answers)
    longer = [answer for answer in cell.answers if _later(answer) > 0]
    tpot = [(answer.chunks_s[-1] - answer.chunks_s[0]) / _later(answer) for answer in longer]
    ttft = [answer.chunks_s[0] - answer.sent_s for answer in cell.answers]
    return Figures(tokens / cell.duration_s, 1e3 * float(np.median(tpot)), 1e3 * float(np.median(ttft)))


def _later(answer: Answer) -> int:
    return len(answer.output_ids) - answer.chunk_tokens[0]


def scripts(cells: Sequence[Cell], method: Method, calibration: Calibration) -> Scripts:
    """Return the scripts of a method's cells, from a single proposer, because suffix decoding remembers answers."""
    proposer = Proposer(method, speculative_config(method), calibration, 0, calibration.scheduler.max_model_len)
    return [
        (cell, [proposer.script(answer.prompt_ids, answer.output_ids, 0.0, "code") for answer in cell.answers])
        for cell in cells
        if cell.method is method
    ]


def simulated(calibration: Calibration, cell: Cell, requests: Sequence[Script], turnaround_s: float) -> Figures:
    """Return the figures of a cell simulated with a new engine; its prompts occur in no other cell."""
    fleet = Fleet([SimulatedReplica("a", calibration, cell.method, speculative_config(cell.method))])
    timeline = run_closed_loop(fleet, requests, cell.concurrency, turnaround_s=turnaround_s)
    tpot_s, ttft_s = float(np.nanmedian(timeline.tpot_s)), float(np.median(timeline.ttft_s))
    return Figures(timeline.tokens_per_s, 1e3 * tpot_s, 1e3 * ttft_s)


def reported(loops: Scripts) -> Scripts:
    """Return the loops without warm-up, prefills and rounds disturbed by other processes.

    A round counts as disturbed if other processes used more than `DISTURBED_SHARE` of a core. If all rounds of a method
    and concurrency were disturbed, the quietest is kept.
    """
    loops = [(cell, requests) for cell, requests in loops if cell.turn >= 0]
    least: dict[tuple[Method, int], float] = {}
    for cell, _ in loops:
        key = cell.method, cell.concurrency
        least[key] = min(cell.foreign_share, least.get(key, np.inf))
    return [
        (cell, requests)
        for cell, requests in loops
        if cell.foreign_share <= max(DISTURBED_SHARE, least[cell.method, cell.concurrency])
    ]


def middle(figures: Sequence[Figures]) -> Figures:
    """Return the medians over the rounds."""
    columns = ([getattr(each, name) for each in figures] for name in ("tokens_per_s", "tpot_ms", "ttft_ms"))
    return Figures(*(float(np.median(column)) for column in columns))
