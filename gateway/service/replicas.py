"""The replicas of the pool file as backends with an address, and how to start those that are started here."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from backends.backend import Backend
from backends.launch.supervisor import LaunchSpec, free_port, vllm_serve_argv
from backends.speculation import num_speculative_tokens, serve_config
from gateway.config.settings import BackendSettings, PoolSettings

_HOST = "127.0.0.1"
SIMULATOR = "simulator"


@dataclass(frozen=True, slots=True)
class Replicas:
    """The whole pool, ready to be started.

    Parameters
    ----------
    backends
        Every replica, in the order of the pool file.
    launches
        The processes to start: one for each served replica, and one for all simulated ones together.
    """

    backends: tuple[Backend, ...]
    launches: tuple[LaunchSpec, ...]


def plan(settings: PoolSettings, run_dir: Path) -> Replicas:
    """Give every replica an address, and work out what must be started.

    Parameters
    ----------
    run_dir
        For logs, and for the simulator's own settings.
    """
    backends: list[Backend] = []
    launches: list[LaunchSpec] = []
    simulated: list[dict[str, Any]] = []
    for model, model_settings in settings.models.items():
        names = (model, *model_settings.aliases)
        for name, one in model_settings.backends.items():
            port = 0 if one.url is not None else free_port(_HOST)
            backend = _backend(model, name, one, f"http://{_HOST}:{port}")
            backends.append(backend)
            if one.serve is not None:
                launches.append(_launch(backend, one, names, port, run_dir))
            elif one.simulate is not None:
                simulated.append(_simulated(backend, one, names, port))
    if simulated:
        launches.append(_launch_simulator(simulated, run_dir))
    return Replicas(tuple(backends), tuple(launches))


def _backend(model: str, name: str, one: BackendSettings, started_at: str) -> Backend:
    return Backend(
        name=name,
        model=model,
        method=one.method,
        url=one.url or started_at,
        num_speculative_tokens=num_speculative_tokens(one.method, one.speculative_config),
        speculative_config=serve_config(one.method, one.speculative_config),
        api_key=one.api_key.get_secret_value() if one.api_key is not None else None,
        weight=one.weight,
        simulated=one.simulate is not None,
    )


def _launch(backend: Backend, one: BackendSettings, names: tuple[str, ...], port: int, run_dir: Path) -> LaunchSpec:
    assert one.serve is not None
    env = dict(one.serve.env)
    if backend.api_key is not None:
        env["VLLM_API_KEY"] = backend.api_key  # not on the command line, which every user of the machine can read
    argv = vllm_serve_argv(
        command=one.serve.command,
        model=one.serve.model,
        served_names=names,
        host=_HOST,
        port=port,
        method=backend.method,
        speculative_config=backend.speculative_config,
        flags=one.serve.flags,
    )
    return LaunchSpec(
        f"{backend.model}/{backend.name}",
        argv,
        (f"{backend.url}/health",),
        env,
        run_dir / f"{backend.model.replace('/', '_')}-{backend.name.replace('/', '_')}.log",
        one.serve.startup_timeout_s,
    )


def _simulated(backend: Backend, one: BackendSettings, names: tuple[str, ...], port: int) -> dict[str, Any]:
    assert one.simulate is not None
    return {
        "name": f"{backend.model}/{backend.name}",
        "model": backend.model,
        "served_model_names": names,
        "method": backend.method,
        "speculative_config": {key: value for key, value in backend.speculative_config.items() if key != "method"},
        "calibration": one.simulate.calibration,
        "host": _HOST,
        "port": port,
        "seed": one.simulate.seed,
        "api_key": backend.api_key,
        "max_model_len": one.simulate.max_model_len,
        "time_scale": one.simulate.time_scale,
    }


def _launch_simulator(simulated: list[dict[str, Any]], run_dir: Path) -> LaunchSpec:
    path = run_dir / "simulator.json"
    path.touch(mode=0o600)  # it holds the API keys
    path.write_bytes(orjson.dumps({"replicas": simulated}))
    return LaunchSpec(
        SIMULATOR,
        (sys.executable, "-m", "backends.simulator", str(path)),
        tuple(f"http://{_HOST}:{one['port']}/health" for one in simulated),
        {},
        run_dir / "simulator.log",
        startup_timeout_s=60.0,
        shutdown_timeout_s=5.0,
    )
