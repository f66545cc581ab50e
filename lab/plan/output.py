"""A plan as a pool file, as values of the Helm chart, and as commands that start its replicas."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import Any

import yaml

from backends.launch.vllm_command import vllm_serve_argv
from lab.plan.mixes import ReplicaKind, gpus_of
from lab.plan.planning import Planned

_FIRST_PORT = 8001
_GPUS = "nvidia.com/gpu"


def pool_file(planned: Planned, said: str) -> str:
    """Return a pool file with the planned replicas, for the gateway to start; `said` heads it as a comment."""
    backends: dict[str, Any] = {}
    for name, kind, gpus in _named(planned):
        backend: dict[str, Any] = {"method": kind.method.value}
        env = {"CUDA_VISIBLE_DEVICES": gpus}
        backend["serve"] = {"model": planned.calibration.target, "flags": _flags(planned), "env": env}
        backend |= _limit(planned, kind, "drafter_limit")
        if kind.config:
            backend["speculative_config"] = kind.config
        backends[name] = backend
    document = {"models": {planned.model: {"policy": dict(planned.policy), "backends": backends}}}
    return (
        "# yaml-language-server: $schema=pool.schema.json\n# Made by `gateway plan`.\n" + _said(said) + _yaml(document)
    )


def helm_values(planned: Planned, said: str) -> str:
    """Return values of the chart deploy/helm/speculation-gateway, with one Deployment per kind in the plan."""
    replicas: dict[str, Any] = {}
    for kind in planned.replicas:
        entry = replicas.setdefault(kind.name, {"method": kind.method.value, "count": 0})
        entry["count"] += 1
        if kind.config:
            entry["speculativeConfig"] = kind.config
            entry |= _limit(planned, kind, "drafterLimit")
    document = {
        "pool": {"models": {planned.model: {"policy": dict(planned.policy)}}},
        "replicaDefaults": {
            "model": planned.model,
            "target": planned.calibration.target,
            "args": _flags(planned),
            "resources": {"limits": {_GPUS: gpus_of(planned.calibration)}},
        },
        "replicas": replicas,
    }
    return "# Made by `gateway plan`, for the chart deploy/helm/speculation-gateway.\n" + _said(said) + _yaml(document)


def serve_commands(planned: Planned) -> list[str]:
    """Return one shell line per replica."""
    lines = []
    for number, (_, kind, gpus) in enumerate(_named(planned)):
        argv = vllm_serve_argv(
            command=("vllm", "serve"),
            model=planned.calibration.target,
            served_names=(planned.model,),
            host="0.0.0.0",
            port=_FIRST_PORT + number,
            method=kind.method,
            speculative_config=kind.config,
            flags=_flags(planned),
        )
        lines.append(f"CUDA_VISIBLE_DEVICES={gpus} {shlex.join(argv)}")
    return lines


def _named(planned: Planned) -> list[tuple[str, ReplicaKind, str]]:
    """Return name, kind and GPUs of each replica."""
    counts: Counter[str] = Counter()
    count = gpus_of(planned.calibration)
    named = []
    for number, kind in enumerate(planned.replicas):
        counts[kind.name] += 1
        gpus = ",".join(str(number * count + offset) for offset in range(count))
        named.append((f"{kind.name}-{counts[kind.name]}", kind, gpus))
    return named


def _limit(planned: Planned, kind: ReplicaKind, key: str) -> dict[str, int]:
    """Return the limit of the calibration's drafter if the context is longer."""
    limit = planned.calibration.method(kind.method).drafter_limit
    longest = planned.max_model_len or planned.calibration.scheduler.max_model_len
    return {key: limit.tokens} if limit is not None and limit.tokens < longest else {}


def _flags(planned: Planned) -> list[str]:
    """Return the memory options of `vllm serve`."""
    calibration, gpus = planned.calibration, gpus_of(planned.calibration)
    options = ["--max-model-len", str(planned.max_model_len)] if planned.max_model_len else []
    options += ["--gpu-memory-utilization", f"{calibration.memory.utilization:g}"]
    return options + (["--tensor-parallel-size", str(gpus)] if gpus > 1 else [])


def _said(said: str) -> str:
    return "".join(f"# {line}\n" for line in said.splitlines())


def _yaml(document: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(document, sort_keys=False, width=120)
    return text
