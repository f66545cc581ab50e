"""The fit recovers the parameters of a simulated engine, and the load generator receives every token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from backends.calibration.calibration import Calibration
from backends.launch.supervisor import Launcher
from backends.simulator.engine.fleet import Fleet, SimulatedReplica
from backends.speculation import Method
from benchmarks.vllm_cpu import measure
from benchmarks.vllm_cpu.calibrate import TEMPLATE
from benchmarks.vllm_cpu.fit import fit_step
from benchmarks.vllm_cpu.load import Answer, closed_loop
from benchmarks.vllm_cpu.measure import PREFILL_TURN, Cell
from benchmarks.vllm_cpu.simulate import Scripts, measured, reported, scripts, simulated
from gateway.config.pool_file import PoolFile
from gateway.service.replicas import plan

TRUE = {
    "base_s": 1.5e-3,
    "per_token_below_knee_s": 1.1e-4,
    "per_token_above_knee_s": 4e-5,
    "per_context_token_s": 2e-7,
}


def template() -> Calibration:
    return Calibration.model_validate(yaml.safe_load(TEMPLATE.read_text(encoding="utf-8")) | {"outside_s": 0.0})


def answered(rng: np.random.Generator, prompt_tokens: int, output_tokens: int) -> Answer:
    ids = rng.integers(0, 2000, prompt_tokens + output_tokens).tolist()
    return Answer(0.0, prompt_ids=ids[:prompt_tokens], output_ids=ids[prompt_tokens:])


def cell(concurrency: int, turn: int, answers: list[Answer], foreign_share: float = 0.0) -> Cell:
    return Cell(Method.BASELINE, concurrency, turn, 0.0, 0.0, 0.0, foreign_share, answers)


def play(calibration: Calibration, silent: Cell) -> Cell:
    """Return the cell as answered by a simulated engine, with chunk times as the load generator records them."""
    [(_, requests)] = scripts([silent], Method.BASELINE, calibration)
    fleet = Fleet([SimulatedReplica("a", calibration, Method.BASELINE)])
    now_s, coming, by_id = 0.0, iter(zip(requests, silent.answers, strict=True)), {}
    idle = silent.concurrency
    while True:
        for script, answer in (next(coming, (None, None)) for _ in range(idle)):
            if script is not None and answer is not None:
                by_id[fleet.submit_script(0, script, now_s)] = answer
                answer.sent_s = now_s
        if (step := fleet.step(now_s)) is None:
            break
        now_s += step.duration_s
        for emission in step.emissions:
            by_id[emission.request_id].chunks_s.append(now_s)
            by_id[emission.request_id].chunk_tokens.append(emission.tokens)
        idle = sum(not emission.left for emission in step.emissions)
    return Cell(Method.BASELINE, silent.concurrency, silent.turn, now_s, 0.0, 0.0, 0.0, silent.answers)


@pytest.mark.slow
def test_the_fit_recovers_the_step_time_behind_the_measurements() -> None:
    rng = np.random.default_rng(5)
    true = template().model_copy(update={"step": template().step.model_copy(update=TRUE)})
    loops = [cell(clients, 0, [answered(rng, 150, 40) for _ in range(2 * clients)]) for clients in (2, 8)]
    singles = [cell(1, PREFILL_TURN, [answered(rng, size, 9) for _ in range(2)]) for size in (100, 400, 900)]
    cells = [play(true, each) for each in (*loops, *singles)]
    fitted = fit_step(cells, template()).step
    for name, value in TRUE.items():
        assert getattr(fitted, name) == pytest.approx(value, rel=0.03), name
    [(_, requests)] = [pair for pair in scripts(cells, Method.BASELINE, true) if pair[0] is cells[1]]
    again = simulated(true, cells[1], requests)
    assert again.tokens_per_s == pytest.approx(measured(cells[1]).tokens_per_s)
    assert again.tpot_ms == pytest.approx(measured(cells[1]).tpot_ms)


def test_disturbed_rounds_are_left_out_unless_all_are_disturbed() -> None:
    quiet, loud, louder = (cell(1, turn, [], share) for turn, share in enumerate((0.01, 0.5, 0.9)))
    warm_up = cell(1, measure.WARM_UP_TURN, [], 0.0)

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
