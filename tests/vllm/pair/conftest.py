"""Two real engines, a baseline and n-gram drafting, started once for all tests of this folder; the last one kills one.

Both take LoRA adapters. The baseline has one loaded and a small KV cache, and tells what it stores and evicts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from backends.launch.ports import free_port
from tests.support.paths import ROOT
from tests.vllm.conftest import UNCOMPILED, Served, serve

BLOCKS = 40
"""Of the baseline's KV cache."""


# Of random weights, for the query and value projections of the tiny model.
ADAPTERS = """
import json
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
target = load_file(".cache/tiny-models/target/model.safetensors")
for seed, name in enumerate(("first", "second")):
    torch.manual_seed(seed)
    tensors = {}
    for weight, one in target.items():
        if weight.endswith(("q_proj.weight", "v_proj.weight")):
            prefix = "base_model.model." + weight.removesuffix("weight")
            tensors[prefix + "lora_A.weight"] = 0.5 * torch.randn(4, one.shape[1])
            tensors[prefix + "lora_B.weight"] = 0.5 * torch.randn(one.shape[0], 4)
    folder = Path(given, name)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(said | {"target_modules": ["q_proj", "v_proj"]}))
"""


@pytest.fixture(scope="package")
def adapters(in_vllm: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two adapters; return their folder."""
    folder = tmp_path_factory.mktemp("adapters")
    in_vllm(ADAPTERS, str(folder))
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
    with serve(folder, str(path), UNCOMPILED) as served:
        served.warm_up()
        yield served
