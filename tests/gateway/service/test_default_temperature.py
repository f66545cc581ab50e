"""Where a model's default temperature comes from: calibrations, the pool file, the engines themselves."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from gateway.config.settings import ModelSettings
from gateway.service.default_temperature import assumed_temperature, known_temperature
from tests.gateway.conftest import MODEL, start_gateway
from tests.support.upstream import Wire
from tests.support.waiting import eventually


def settings(backend: dict[str, Any], **fields: Any) -> ModelSettings:
    backends = {"a": {"method": "baseline", **backend}}
    return ModelSettings.model_validate({"policy": {"name": "round_robin"}, "backends": backends, **fields})


def test_a_simulated_replica_takes_its_calibrations_default() -> None:
    assert known_temperature(settings({"simulate": {"calibration": "llama-3.1-8b-h100"}})) == 0.6


def test_another_temperature_in_the_pool_file_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    simulated = {"simulate": {"calibration": "llama-3.1-8b-h100"}}
    with caplog.at_level(logging.WARNING):
        assert known_temperature(settings(simulated, default_temperature=0.9)) == 0.6
    assert "default_temperature is 0.9 in the pool file, but 0.6 at the engines" in caplog.text


def test_the_pool_file_speaks_for_replicas_elsewhere() -> None:
    elsewhere = {"url": "http://127.0.0.1:1"}
    assert known_temperature(settings(elsewhere, default_temperature=0.0)) == 0.0
    assert known_temperature(settings(elsewhere)) is None
    assert assumed_temperature(settings(elsewhere)) == 1.0


async def test_a_replica_elsewhere_is_asked_once_it_is_up_and_after_each_restart() -> None:
    temperature = 0.35

    async def answer(wire: Wire) -> None:
        text = json.dumps({"object": "response", "temperature": temperature}).encode()
        await wire.send(
            b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text) + text
        )

    async with start_gateway({"a": "baseline"}, default_temperature=None, behaviour=answer) as running:
        await eventually(lambda: running.gateway.models[MODEL].default_temperature == 0.35)
        temperature = 0.6
        running.upstreams["a"].max_model_len = 4096
        await eventually(lambda: running.gateway.models[MODEL].default_temperature == 0.6)
