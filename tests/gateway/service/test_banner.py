"""Output at startup."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from gateway.config.pool_file import PoolFile
from gateway.config.settings import PoolSettings
from gateway.service.banner import pool_lines, start_lines, try_line

ADDRESS = "127.0.0.1:8080"
URL = f"http://{ADDRESS}"


def pool(**more: Any) -> PoolSettings:
    backends = {
        "six": {"method": "baseline", "url": "http://[fd00::1]:8000", "weight": 0.5},
        "own": {"method": "draft_model", "serve": {"model": "[a]/target"}, "speculative_config": PARD},
        "tree": {"method": "suffix", "simulate": {"calibration": "llama-3.1-8b-h100"}},
    }
    other = {
        "policy": {"name": "random"},
        "backends": {"only": {"method": "baseline", "url": "unix:/run/it"}},
        "discover": {
            "service": {"method": "suffix", "kubernetes": {"service": "vllm", "port": 8000}},
            "pods": {"inference_pool": {"name": "llama"}, "method": "suffix", "weight": 2},
        },
    }
    models = {"its-first": {"policy": {"name": "random"}, "backends": backends}, "other": other}
    return PoolFile.model_validate({"models": models, **more})


PARD = {"model": "pard", "num_speculative_tokens": 8, "parallel_drafting": True}


def test_the_table_of_the_pool() -> None:
    assert list(pool_lines(pool())) == [
        "its-first, by random:",
        "  backend  method                   k  weight  where",
        "  six      baseline                       0.5  http://[fd00::1]:8000",
        "  own      draft_model (parallel)   8       1  started here ([a]/target)",
        "  tree     suffix                  24       1  simulated (llama-3.1-8b-h100)",
        "other, by random:",
        "  backend      method     k  weight  where",
        "  only         baseline           1  unix:/run/it",
        "  service/...  suffix    24       1  found by Kubernetes (vllm)",
        "  pods/...     by label           2  found by InferencePool (llama)",
    ]


@pytest.mark.parametrize(
    ("policy", "k", "alike"), [("learned", 5, True), ("learned", 4, False), ("least_loaded", 5, False)]
)
def test_replicas_that_are_alike_leave_learned_nothing_to_choose(policy: str, k: int, alike: bool) -> None:
    backends = {
        name: {"url": f"http://{name}", "speculative_config": {"method": "ngram", "num_speculative_tokens": each}}
        for name, each in (("a", 5), ("b", k))
    }
    lines = pool_lines(PoolFile.model_validate({"models": {"m": {"policy": policy, "backends": backends}}}))
    assert ["All 2 speculate alike (ngram): `learned`" in line for line in lines if line.startswith("  All")] == (
        [True] if alike else []
    )


def test_an_open_gateway_and_a_generated_admin_key_are_announced() -> None:
    lines = start_lines(pool(), [ADDRESS], "generated-key")
    assert lines[0] == f"Listening at {URL}  (OpenAI base_url: {URL}/v1)"
    assert sum(line.startswith("1 replica is simulated: ") for line in lines) == 1
    assert "Open: no keys are set, so anyone who can reach this address can use it." in lines
    assert "Admin key of this run: generated-key" in lines
    assert f"Dashboard at {URL}/dashboard#key=generated-key" in lines


def test_configured_keys_are_not_printed() -> None:
    lines = start_lines(pool(keys=["secret-1"], admin={"key": "secret-2"}), [ADDRESS])
    assert not any("secret" in line or line.startswith("Open:") or "Admin" in line for line in lines)
    assert "Authorization: Bearer YOUR-KEY" in try_line(pool(keys=["secret-1"]), URL)


def test_the_dashboard_is_at_the_admin_address_if_there_is_one() -> None:
    lines = start_lines(pool(admin={"key": "k"}), [ADDRESS])
    assert f"Dashboard at {URL}/dashboard" in lines
    assert "Dashboard at http://10.0.0.1:1/dashboard" in start_lines(
        pool(admin={"listen": "10.0.0.1:1"}), [ADDRESS, "10.0.0.1:1"]
    )


def test_the_example_command_is_a_chat_request() -> None:
    words = shlex.split(try_line(pool(), URL))
    assert words[:3] == ["curl", "-N", f"{URL}/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["messages"][0]["role"]) == ("its-first", "user")
