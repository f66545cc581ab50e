"""LoRA adapters of real engines: loaded at the start or while they run, on one replica or on both."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.waiting import eventually_blocking
from tests.vllm.conftest import Served

pytestmark = pytest.mark.vllm


def ask(served: Served, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "def merge(", "max_tokens": 12, "temperature": 0}
    return served.http.post(f"{served.url}/v1/completions", json=body)


def test_a_request_goes_where_its_adapter_is_loaded(served: Served, adapters: Path) -> None:
    listed = {each.id: (each.model_extra or {})["parent"] for each in served.openai.models.list()}
    assert listed == {"tiny": None, "first": "tiny"}
    answers = [ask(served, "first") for _ in range(4)]
    assert {each.headers["x-gateway-backend"] for each in answers} == {"plain"}
    texts = {model: ask(served, model).json()["choices"][0]["text"] for model in ("tiny", "first")}
    assert texts["tiny"] != texts["first"], "the adapter changes the answer"
    assert ask(served, "second").status_code == 404

    engine = served.backends()["lookup"]["url"]
    for name in ("first", "second"):
        loaded = {"lora_name": name, "lora_path": str(adapters / name)}
        served.http.post(f"{engine}/v1/load_lora_adapter", json=loaded).raise_for_status()
    eventually_blocking(lambda: ask(served, "second").status_code == 200)
    assert ask(served, "second").headers["x-gateway-backend"] == "lookup"
    served.http.post(f"{engine}/v1/unload_lora_adapter", json={"lora_name": "second"}).raise_for_status()
    eventually_blocking(lambda: ask(served, "second").status_code == 404)
    assert ask(served, "first").status_code == 200
