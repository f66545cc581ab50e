"""A plan as a pool file, and as commands that start its replicas."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from backends.launch.vllm_command import vllm_serve_argv
from backends.memory.estimate import Machine
from backends.speculation import Method
from lab.plan.mixes import Kind, Mix

_FIRST_PORT = 8001


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica of a plan: its name, kind and GPUs."""

    name: str
    kind: Kind
    gpus: str


def replicas(mix: Mix, kinds: Sequence[Kind], machine: Machine) -> list[Replica]:
    """Return the replicas of a mix, each with its own name and GPUs."""
    counts: Counter[str] = Counter()
    result = []
    for number, index in enumerate(mix):
        kind = kinds[index]
        name = kind.title.replace(" k=", "-k").replace("_", "-")
        counts[name] += 1
        first = number * machine.tensor_parallel
        gpus = ",".join(str(first + offset) for offset in range(machine.tensor_parallel))
        result.append(Replica(f"{name}-{counts[name]}", kind, gpus))
    return result


def flags(machine: Machine, max_model_len: int) -> list[str]:
    """Return the memory options of `vllm serve`."""
    options = ["--max-model-len", str(max_model_len), "--gpu-memory-utilization", f"{machine.utilization:g}"]
    return options + (["--tensor-parallel-size", str(machine.tensor_parallel)] if machine.tensor_parallel > 1 else [])


def pool_file(
    model: str,
    policy: dict[str, Any],
    chosen: Sequence[Replica],
    *,
    target: str,
    machine: Machine,
    max_model_len: int,
    simulate: str | None,
) -> str:
    """Return a pool file with these replicas, which the gateway starts itself.

    Parameters
    ----------
    model
        Model name for clients.
    policy
        Content of `policy:`.
    target
        Name of the target model's weights.
    max_model_len
        Maximum context in tokens.
    simulate
        Calibration for simulated replicas; None for real ones.
    """
    backends: dict[str, Any] = {}
    for one in chosen:
        backend: dict[str, Any] = {"method": one.kind.method.value}
        if simulate is not None:
            backend["simulate"] = {"calibration": simulate, "max_model_len": max_model_len}
        else:
            backend["serve"] = {
                "model": target,
                "flags": flags(machine, max_model_len),
                "env": {"CUDA_VISIBLE_DEVICES": one.gpus},
            }
        config = one.kind.config
        if simulate is not None:
            config.pop("model", None)
        if config:
            backend["speculative_config"] = config
        backends[one.name] = backend
    document = {"models": {model: {"policy": policy, "backends": backends}}}
    text: str = yaml.safe_dump(document, sort_keys=False, width=120)
    return "# yaml-language-server: $schema=pool.schema.json\n# Made by `gateway plan`.\n" + text


def serve_commands(
    model: str, chosen: Sequence[Replica], *, target: str, machine: Machine, max_model_len: int
) -> list[str]:
    """Return one shell line for each replica."""
    lines = []
    for number, one in enumerate(chosen):
        argv = vllm_serve_argv(
            command=("vllm", "serve"),
            model=target,
            served_names=(model,),
            host="0.0.0.0",
            port=_FIRST_PORT + number,
            method=Method(one.kind.method),
            speculative_config=one.kind.config,
            flags=flags(machine, max_model_len),
        )
        lines.append(f"CUDA_VISIBLE_DEVICES={one.gpus} {shlex.join(argv)}")
    return lines
