"""Where a model's default temperature comes from: calibrations, the pool file, the engines themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.config.settings import ModelSettings
from gateway.service.change import prepare
from gateway.service.default_temperature import assumed_temperature, known_temperature
from tests.gateway.conftest import MODEL, start_gateway
from tests.support.upstream import Wire
from tests.support.waiting import eventually

SIMULATED, ELSEWHERE = {"simulate": {"calibration": "llama-3.1-8b-h100"}}, {"url": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("backend", "given", "known"),
    [(SIMULATED, None, 0.6), (SIMULATED, 0.9, 0.6), (ELSEWHERE, 0.0, 0.0), (ELSEWHERE, None, None)],
)
def test_a_calibration_comes_before_the_pool_file_which_is_reported(
    backend: dict[str, Any], given: float | None, known: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    backends = {"a": {"method": "baseline", **backend}}
    settings = ModelSettings.model_validate({"backends": backends, "default_temperature": given})
    assert known_temperature(settings) == known
    assert assumed_temperature(settings) == (1.0 if known is None else known)
    said = "default_temperature is 0.9 in the pool file, but 0.6 at the engines"
    assert caplog.messages == ([said] if given == 0.9 else [])


@pytest.mark.slow
async def test_a_replica_elsewhere_is_asked_once_it_is_up_and_after_each_restart() -> None:
    temperature = 0.35

    async def answer(wire: Wire) -> None:
        text = json.dumps({"object": "response", "temperature": temperature}).encode()
        await wire.send(
            b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text) + text
        )

    async with start_gateway({"a": "baseline"}, default_temperature=None, behaviour=answer) as running:
        await eventually(lambda: running.gateway.models[MODEL].default_temperature == 0.35)
        change = await prepare(running.gateway, running.gateway.settings, [*running.gateway.pool], b"")
        temperature = 0.6
        running.upstreams["a"].max_model_len = 4096
        await eventually(lambda: running.gateway.models[MODEL].default_temperature == 0.6)
        change.commit()  # of a reload that began before
        await eventually(lambda: running.gateway.models[MODEL].default_temperature == 0.6)
