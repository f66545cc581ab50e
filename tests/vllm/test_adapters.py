"""LoRA adapters of real engines: loaded at the start or while they run, on one replica or on both."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.waiting import eventually_blocking
from tests.vllm.conftest import Served

pytestmark = pytest.mark.vllm

POOL = ""
RANK = 4


def make_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter of random weights for the query and value projections of the tiny model."""
    config = json.loads((ROOT / ".cache/tiny-models/target/config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, count in (("q_proj", heads), ("v_proj", config["num_key_value_heads"])):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = rng.normal(0.0, 0.5, (RANK, hidden)).astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = rng.normal(0.0, 0.5, (count * size, RANK)).astype(np.float32)
    header, body = {}, b""
    for name, tensor in tensors.items():
        begin, body = len(body), body + tensor.tobytes()
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [begin, len(body)]}
    head = json.dumps(header).encode()
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + body)
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 8, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(said | {"target_modules": ["q_proj", "v_proj"]}))
    return folder


@pytest.fixture(scope="module", autouse=True)
def adapters(request: pytest.FixtureRequest, installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two adapters, and a pool of two replicas of which one has the first loaded; return their folder."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second")):
        make_adapter(folder / name, seed)
    pool = yaml.safe_load((ROOT / "tests/vllm/pool.methods.yaml").read_text())
    tiny = pool["models"]["tiny"]
    serve = tiny["backends"]["tree"]["serve"]
    lora = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
    env = {**serve["env"], "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    flags = {"plain": [*lora, "--lora-modules", f"first={folder / 'first'}"], "lookup": lora}
    said = {
        "plain": {"method": "baseline"},
        "lookup": {"method": "ngram", "speculative_config": {"num_speculative_tokens": 3, "prompt_lookup_max": 4}},
    }
    tiny["backends"] = {
        name: {**said[name], "serve": {**serve, "env": env, "flags": [*serve["flags"], *flags[name]]}} for name in said
    }
    path = folder / "pool.yaml"
    path.write_text(yaml.safe_dump(pool))
    request.module.POOL = str(path)
    return folder


def ask(served: Served, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "def merge(", "max_tokens": 12, "temperature": 0}
    return served.http.post(f"{served.url}/v1/completions", json=body)


def test_a_request_goes_where_its_adapter_is_loaded(served: Served, adapters: Path) -> None:
    served.warm_up()
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
