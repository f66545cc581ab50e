"""The default temperature of engines, from the files and flags that vLLM reads and from what an engine reports."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from backends.default_temperature import VLLM_DEFAULT, configured_temperature, reported_temperature
from tests.support.upstream import Upstream, Wire


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], 0.6),
        (["--max-model-len", "2048", "--enforce-eager"], 0.6),
        (["--generation-config", "vllm"], VLLM_DEFAULT),
        (["--generation_config=vllm"], VLLM_DEFAULT),
        (["--override-generation-config", '{"temperature": 0.2}'], 0.2),
        (["--override-generation-config.temperature", "0.3"], 0.3),
        (["--override-generation-config", '{"top_p": 0.5}'], 0.6),
        (["--generation-config", "vllm", "--override-generation-config", '{"temperature": 0}'], 0.0),
    ],
)
def test_flags_win_over_the_models_own_file(model: Path, flags: list[str], expected: float) -> None:
    assert configured_temperature(str(model), flags, {}) == expected


def test_a_folder_of_another_generation_config(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "generation_config.json").write_text('{"temperature": 0.9}')
    assert configured_temperature(str(model), ["--generation-config", str(other)], {}) == 0.9


@pytest.mark.parametrize(
    "text", ["{}", "not JSON", "[]", '{"temperature": "hot"}', '{"temperature": -1}', '{"temperature": true}']
)
def test_a_file_without_a_usable_temperature_means_vllms_default(model: Path, text: str) -> None:
    (model / "generation_config.json").write_text(text)
    assert configured_temperature(str(model), [], {}) == VLLM_DEFAULT


def test_a_folder_without_the_file_means_vllms_default(tmp_path: Path) -> None:
    assert configured_temperature(str(tmp_path), [], {}) == VLLM_DEFAULT


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_a_model_of_the_hub_is_read_from_its_cache(tmp_path: Path, variable: str) -> None:
    hub = tmp_path / "hub" if variable == "HF_HOME" else tmp_path
    environment = {variable: str(tmp_path)}
    repository = hub / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    assert configured_temperature("org/name", [], environment) is None, "not downloaded yet"
    (snapshot / "config.json").write_text("{}")
    assert configured_temperature("org/name", [], environment) == VLLM_DEFAULT
    (snapshot / "generation_config.json").write_text('{"temperature": 0.7}')
    assert configured_temperature("org/name", [], environment) == 0.7
    assert configured_temperature("org/name", ["--revision", "c0ffee"], environment) == 0.7
    assert configured_temperature("org/name", ["--revision", "other"], environment) is None


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, {"object": "response", "temperature": 0.25}, 0.25),
        (200, {"object": "response"}, None),
        (404, {"detail": "Not Found"}, None),
    ],
)
async def test_an_engine_is_asked(status: int, body: dict[str, object], expected: float | None) -> None:
    asked: list[dict[str, object]] = []

    async def answer(wire: Wire) -> None:
        asked.append(wire.seen.json)
        text = json.dumps(body).encode()
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(text))
        await wire.send(head + text)

    async with Upstream("a", "m") as upstream:
        upstream.behaviour = answer  # type: ignore[assignment]
        async with httpx.AsyncClient(base_url=upstream.url, trust_env=False) as client:
            assert await reported_temperature(client, "m") == expected
    assert asked == [{"model": "m", "input": "Hi", "max_output_tokens": 1, "store": False}]


async def test_an_engine_that_is_gone_reports_nothing() -> None:
    async with httpx.AsyncClient(base_url="http://127.0.0.1:1", trust_env=False) as client:
        assert await reported_temperature(client, "m") is None
