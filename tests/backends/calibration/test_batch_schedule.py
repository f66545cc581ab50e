"""The best k for each batch size: the step times of the simulated engine, and ranges that vLLM takes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from backends.calibration.batch_schedule import SCHEDULED, decode_step_s, goodput, ranges_of
from backends.calibration.files import calibration_names
from backends.calibration.load import load_calibration
from backends.calibration.parameters import EngineParameters
from backends.simulator.engine.fleet import Fleet, SimulatedReplica
from backends.simulator.engine.step import EngineStep
from backends.speculation import Method
from tests.backends.simulator.engine.fleets import steady, steps_of


def decoding_step(parameters: EngineParameters, method: Method, name: str, batch: int) -> EngineStep:
    """Return the third step of a batch of equal requests, which accept no drafts."""
    fleet = Fleet([SimulatedReplica("a", load_calibration(name), method, parameters=parameters)])
    for _ in range(batch):
        fleet.submit_script(0, steady(37, 40, parameters.k, 1), 0.0)
    return steps_of(fleet, 3)[-1]


@pytest.mark.parametrize("method", sorted(SCHEDULED))
@pytest.mark.parametrize("name", calibration_names())
def test_a_step_takes_what_the_simulated_engine_takes(name: str, method: Method) -> None:
    calibration = load_calibration(name)
    for k in (0, 1, 4):
        config = {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 8, k]]}
        parameters = EngineParameters.of(calibration, method, config)
        for batch in (1, 12):
            step = decoding_step(parameters, method, name, batch)
            assert (step.k, step.batch_tokens) == (k, batch * (1 + k))
            expected = decode_step_s(parameters, np.array([float(batch)]), k, step.context_tokens / batch)
            assert step.duration_s == pytest.approx(expected[0])


@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.03])
def test_ranges_cover_every_batch_and_lose_no_more_than_the_tolerance(tolerance: float) -> None:
    parameters = EngineParameters.of(
        load_calibration("llama-3-70b-2xh200"), Method.EAGLE3, {"num_speculative_tokens": 8}
    )
    tokens = np.cumsum([1.0, *(0.75**position for position in range(1, 9))])
    table = goodput(parameters, tokens.tolist(), 500.0, 512)
    ranges = ranges_of(table, tolerance)
    assert ranges[0][0] == 1
    assert ranges[-1][1] == 512
    assert all(later[0] == earlier[1] + 1 for earlier, later in pairwise(ranges))
    for batch, best in enumerate(table.argmax(axis=1).tolist(), 1):
        [k] = [k for first, last, k in ranges if first <= batch <= last]
        assert abs(k - best) <= 1
        assert table[batch - 1, k] >= (1 - tolerance) * table[batch - 1, best]
    exact = ranges_of(table, 0.0)
    assert [k for _, _, k in exact] == sorted({k for _, _, k in exact}, reverse=True)
    assert len(ranges) <= len(exact)
