"""The same closed loops in virtual time: the recorded prompts and answers, in the order they were sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backends.calibration.calibration import Calibration
from backends.calibration.parameters import EngineParameters
from backends.simulator.drafting.proposers import Proposer, Script
from backends.simulator.engine.engine import Engine
from backends.simulator.engine.virtual_time import run_closed_loop
from backends.speculation import Method
from benchmarks.vllm_cpu.engines import speculative_config
from benchmarks.vllm_cpu.load import Answer
from benchmarks.vllm_cpu.measure import PREFILL_TURN, Cell

DISTURBED_SHARE = 0.15
Scripts = list[tuple[Cell, list[Script]]]


@dataclass(frozen=True, slots=True)
class Figures:
    """What a closed loop comes to.

    Parameters
    ----------
    tokens_per_s
        Output tokens over the time from the first request to the last token.
    tpot_ms, ttft_ms
        Medians over requests.
    tokens_per_step
        Output tokens over those that were not accepted drafts.
    """

    tokens_per_s: float
    tpot_ms: float
    ttft_ms: float
    tokens_per_step: float


def measured(cell: Cell) -> Figures:
    """Return what a real engine did."""
    tokens = sum(len(one.output_ids) for one in cell.answers)
    accepted = sum(sum(one.accepted_at) for one in cell.answers)
    tpot = [(one.chunks_s[-1] - one.chunks_s[0]) / _later(one) for one in cell.answers if _later(one) > 0]
    ttft = [one.chunks_s[0] - one.sent_s for one in cell.answers]
    return Figures(
        tokens / cell.duration_s,
        1e3 * float(np.median(tpot)),
        1e3 * float(np.median(ttft)),
        tokens / (tokens - accepted),
    )


def _later(answer: Answer) -> int:
    return len(answer.output_ids) - answer.chunk_tokens[0]


def scripts(cells: Sequence[Cell], method: Method, calibration: Calibration, seed: int = 0) -> Scripts:
    """Return the scripts of a method's cells, all from one proposer, since a suffix tree remembers earlier answers."""
    proposer = Proposer(method, speculative_config(method), calibration, seed, calibration.scheduler.max_model_len)
    return [
        (cell, [proposer.script(one.prompt_ids, one.output_ids, 0.0, "code") for one in cell.answers])
        for cell in cells
        if cell.method is method
    ]


def simulated(calibration: Calibration, cell: Cell, of_cell: Sequence[Script]) -> Figures:
    """Play a cell with a fresh engine; its prompts are shared with no other cell."""
    engine = Engine(EngineParameters.of(calibration, cell.method, speculative_config(cell.method)))
    timeline = run_closed_loop(engine, of_cell, cell.concurrency)
    counters = engine.counters
    return Figures(
        timeline.tokens_per_s,
        1e3 * float(np.nanmedian(timeline.tpot_s)),
        1e3 * float(np.median(timeline.ttft_s)),
        counters.generation_tokens / (counters.generation_tokens - counters.accepted_tokens),
    )


def reported(loops: Scripts) -> Scripts:
    """Leave out warming up and prefills, and of each method and concurrency the rounds that others disturbed.

    A round counts as disturbed if others took more than `DISTURBED_SHARE` of a core; where all are, the quietest stays.
    """
    loops = [(cell, of) for cell, of in loops if cell.turn >= 0]
    least: dict[tuple[Method, int], float] = {}
    for cell, _ in loops:
        key = cell.method, cell.concurrency
        least[key] = min(cell.foreign_share, least.get(key, np.inf))
    return [
        (cell, of)
        for cell, of in loops
        if cell.foreign_share <= max(DISTURBED_SHARE, least[cell.method, cell.concurrency])
    ]


def is_prefill(cell: Cell) -> bool:
    """Tell whether a cell is a prefill of one size."""
    return cell.turn == PREFILL_TURN


def middle(figures: Sequence[Figures]) -> Figures:
    """Return the medians over the rounds."""
    columns = (
        [getattr(one, name) for one in figures] for name in ("tokens_per_s", "tpot_ms", "ttft_ms", "tokens_per_step")
    )
    return Figures(*(float(np.median(column)) for column in columns))
