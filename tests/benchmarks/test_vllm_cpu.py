"""Disturbed rounds are left out, and the load generator receives every token."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.launch.supervisor import Launcher
from backends.speculation import Method
from benchmarks.vllm_cpu import measure
from benchmarks.vllm_cpu.load import closed_loop
from benchmarks.vllm_cpu.measure import Cell
from benchmarks.vllm_cpu.simulate import Scripts, reported
from gateway.config.pool_file import PoolFile
from gateway.service.replicas import plan


def cell(turn: int, foreign_share: float) -> Cell:
    return Cell(Method.BASELINE, 1, turn, 0.0, 0.0, 0.0, foreign_share, [])


def test_disturbed_rounds_are_left_out_unless_all_are_disturbed() -> None:
    quiet, loud, louder = (cell(turn, share) for turn, share in enumerate((0.01, 0.5, 0.9)))
    warm_up = cell(measure.WARM_UP_TURN, 0.0)

    def kept(*cells: Cell) -> list[Cell]:
        paired: Scripts = [(each, []) for each in cells]
        return [each for each, _ in reported(paired)]

    assert kept(warm_up, quiet, loud) == [quiet]
    assert kept(louder, loud) == [loud]


@pytest.mark.slow
async def test_the_load_generator_receives_every_token(tmp_path: Path) -> None:
    backend = {"method": "eagle", "speculative_config": {"num_speculative_tokens": 3}}
    one_backend = {"one": {**backend, "simulate": {"calibration": "llama-3.1-8b-h100"}}}
    pool = PoolFile.model_validate({"models": {"tiny": {"policy": {"name": "least_loaded"}, "backends": one_backend}}})
    replicas = plan(pool, tmp_path)
    launcher = Launcher(replicas.launches)
    await launcher.start()
    try:
        await launcher.wait_ready()
        played = await closed_loop(replicas.backends[0].url, [(f"prompt {n}", 20 + n) for n in range(6)], 3)
    finally:
        await launcher.stop()
    assert [len(answer.output_ids) for answer in played.answers] == [20 + n for n in range(6)]
    for answer in played.answers:
        assert sum(answer.chunk_tokens) == len(answer.output_ids)
        assert answer.prompt_ids
        assert answer.sent_s < answer.chunks_s[0] <= answer.chunks_s[-1] <= played.duration_s
        assert len(answer.chunk_tokens) < len(answer.output_ids)  # drafts were accepted
        assert answer.drafted > 0
        assert len(answer.output_ids) - sum(answer.accepted_at) <= len(answer.chunk_tokens) + 1
    # The fourth request was sent when one of the first three had ended.
    assert played.answers[3].sent_s >= min(answer.chunks_s[-1] for answer in played.answers[:3])
