"""Fleets of one engine, and what their steps do."""

from __future__ import annotations

import numpy as np

from backends.calibration.load import load_calibration
from backends.calibration.parameters import EngineParameters
from backends.drafting.script import Script, plain_steps
from backends.simulator.engine.fleet import EngineStep, Fleet, SimulatedReplica
from backends.speculation import Method

H100 = load_calibration("llama-3.1-8b-h100")


def engine_of(parameters: EngineParameters) -> Fleet:
    return Fleet([SimulatedReplica("a", H100, Method.BASELINE, parameters=parameters)])


def plain(prompt: int, output: int, blocks: tuple[int, ...] = ()) -> Script:
    return Script(prompt, output, *plain_steps(output), blocks)


def steady(prompt: int, output: int, k: int, emitted: int) -> Script:
    """Return a script of which every step drafts k tokens and emits `emitted`, as far as the output allows."""
    tokens = np.minimum(emitted, output - np.arange(output)).astype(np.int32)
    drafted = np.full(output, k, np.int32)
    tokens[0], drafted[0] = 1, 0
    return Script(prompt, output, tokens, drafted)


def next_step(engine: Fleet, now_s: float = 0.0) -> EngineStep:
    step = engine.step(now_s)
    assert step is not None
    return step


def steps_of(engine: Fleet, most: int = 1_000_000) -> list[EngineStep]:
    """Return the steps until all requests have ended, or so many."""
    now_s, steps = 0.0, list[EngineStep]()
    while len(steps) < most and (step := engine.step(now_s)) is not None:
        now_s += step.duration_s
        steps.append(step)
    return steps
