"""Two real engines, a baseline and n-gram drafting, started once for all tests of this folder; the last one kills one.

Both take LoRA adapters. The baseline has one loaded and a small KV cache, and tells what it stores and evicts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from backends.launch.ports import free_port
from tests.support.paths import ROOT
from tests.vllm.conftest import SEVERAL, Served, serve

BLOCKS = 64
"""Of the baseline's KV cache."""
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


@pytest.fixture(scope="package")
def adapters(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two adapters; return their folder."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second")):
        make_adapter(folder / name, seed)
    return folder


@pytest.fixture(scope="package")
def served(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start the gateway with both engines."""
    pool = yaml.safe_load((ROOT / "tests/vllm/pool.methods.yaml").read_text())
    tiny, port = pool["models"]["tiny"], free_port()
    serve_both = tiny["backends"]["tree"]["serve"]
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"}
    lora = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
    flags = {
        "plain": [
            *("--lora-modules", f"first={adapters / 'first'}", "--kv-events-config", json.dumps(events)),
            *("--enable-prompt-tokens-details", "--num-gpu-blocks-override", str(BLOCKS)),
        ],
        "lookup": [],
    }
    env = {**serve_both["env"], "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1"}
    said: dict[str, dict[str, Any]] = {
        "plain": {"method": "baseline", "kv_events": f"tcp://127.0.0.1:{port}"},
        "lookup": {"method": "ngram", "speculative_config": {"num_speculative_tokens": 3, "prompt_lookup_max": 4}},
    }
    tiny["backends"] = {
        name: {**one, "serve": {**serve_both, "env": env, "flags": [*serve_both["flags"], *lora, *flags[name]]}}
        for name, one in said.items()
    }
    folder = tmp_path_factory.mktemp("pair")
    path = folder / "pool.yaml"
    path.write_text(yaml.safe_dump(pool))
    # Workers are processes of their own, as on several GPUs: streams are sent while the next step is computed.
    with serve(folder, str(path), SEVERAL) as served:
        served.warm_up()
        yield served
