"""Addresses of the replicas in the pool file, and the processes that the gateway starts for them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from backends import background
from backends.backend import Backend
from backends.calibration.load import load_calibration
from backends.draft_schedule import draft_tokens
from backends.drafter_limit import DrafterLimit, beyond_of
from backends.files.draft_config import longest_drafted
from backends.http.address import Address
from backends.launch.ports import free_port
from backends.launch.supervisor import LaunchSpec
from backends.launch.vllm_command import vllm_serve_argv
from backends.speculation import Method, serve_config
from gateway.config.settings import BackendSettings, DiscoverSettings, ModelSettings, PoolSettings
from gateway.discovery.discovery import Found

_HOST = "127.0.0.1"
SIMULATOR = "simulator"


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas of a pool, before they are started."""

    backends: tuple[Backend, ...]  # all replicas, in the order of the pool file
    # The processes to start: one for each served replica, and one for all simulated replicas.
    launches: tuple[LaunchSpec, ...]


def plan(settings: PoolSettings, run_dir: Path, before: Replicas | None = None, found: Found | None = None) -> Replicas:
    """Assign addresses to the replicas, and return the processes to run; existing ones keep their ports."""
    taken = {each.url for model in settings.models.values() for each in model.backends.values()}
    known = {} if before is None else {(each.model, each.name): each.url for each in before.backends if each.launched}
    ports = {Address.parse(url).port for url in (*taken, *known.values()) if url}
    backends: list[Backend] = []
    launches: list[LaunchSpec] = []
    simulated: list[dict[str, Any]] = []
    for model, model_settings in settings.models.items():
        names = (model, *model_settings.aliases)
        for name, backend_settings in model_settings.backends.items():
            if backend_settings.url is not None:
                backends.append(_backend(model, name, backend_settings, backend_settings.url))
                continue
            url = known.get((model, name))
            port = free_port(_HOST, ports) if url is None else int(url.rpartition(":")[2])
            ports.add(port)  # reserved, since an engine takes a minute to bind its own
            backend = _backend(model, name, backend_settings, f"http://{_HOST}:{port}")
            backends.append(backend)
            if backend_settings.serve is not None:
                launches.append(_launch(backend, backend_settings, names, port, run_dir))
            elif before is None:
                simulated.append(_simulated(backend, backend_settings, names, port))
        backends += _discovered(model, model_settings, found or {}, taken)
    if simulated:
        launches.append(_launch_simulator(simulated, run_dir))
    simulators = [] if before is None else [each for each in before.launches if each.name == SIMULATOR]
    return Replicas(tuple(backends), (*launches, *simulators))


def configured(settings: PoolSettings) -> list[Backend]:
    """Return the replicas of the pool file; those not started yet have no address."""
    return [
        _backend(model, name, each, each.url or "")
        for model, model_settings in settings.models.items()
        for name, each in model_settings.backends.items()
    ]


def _discovered(model: str, settings: ModelSettings, found: Found, taken: set[str | None]) -> Iterator[Backend]:
    """Yield the replicas that the sources of a model have found, and add their addresses to `taken`."""
    for source, discover in settings.discover.items():
        for replica in found.get((model, source), ()):
            if replica.url not in taken:
                taken.add(replica.url)
                own, name = replica.own and _with_common(replica.own, discover), f"{source}/{replica.name}"
                with background.guarded("discovery", of=f"{model}/{name}"):  # the others can join
                    Address.parse(replica.url)
                    yield _backend(model, name, own or discover, replica.url)


def _with_common(own: BackendSettings, discover: DiscoverSettings) -> BackendSettings:
    """Return the settings that a replica reports, completed with those of its source."""
    weight = own.weight if "weight" in own.model_fields_set else discover.weight
    limit = own.drafter_limit or (discover.drafter_limit if own.method is discover.method else None)
    depth = own.draft_depth or (discover.draft_depth and own.method is not Method.BASELINE)
    update = {"api_key": discover.api_key, "weight": weight, "drafter_limit": limit, "draft_depth": depth}
    return own.model_copy(update=update)


def _backend(model: str, name: str, settings: BackendSettings | DiscoverSettings, url: str) -> Backend:
    started = settings if isinstance(settings, BackendSettings) and settings.url is None else None
    assert settings.method is not None
    config = serve_config(settings.method, settings.speculative_config)
    simulate, limit = None if started is None else started.simulate, limit_of(settings)
    if simulate is not None and limit is None:
        limit = load_calibration(simulate.calibration).method(settings.method).drafter_limit
    return Backend(
        name=name,
        model=model,
        method=settings.method,
        url=url,
        num_speculative_tokens=draft_tokens(settings.method, config),
        speculative_config=config,
        api_key=settings.api_key.get_secret_value() if settings.api_key is not None else None,
        weight=settings.weight,
        simulated=simulate is not None,
        launched=started is not None,
        flags=None if started is None or started.serve is None else tuple(started.serve.flags),
        drafter_limit=limit,
        draft_depth=settings.draft_depth,
        context_range=_range_of(settings.context_range) if isinstance(settings, BackendSettings) else None,
        asks_version=simulate is None and (settings.drafter_limit is None or settings.drafter_limit.beyond is None),
    )


def _range_of(said: str | None) -> tuple[int, int] | None:
    least, _, most = (said or "").partition("-")
    return (int(least), int(most)) if most else None


def limit_of(settings: BackendSettings | DiscoverSettings) -> DrafterLimit | None:
    """Return the limit of a replica's drafter, from its settings or its draft model."""
    said, method = settings.drafter_limit, settings.method
    assert method is not None
    tokens = longest_drafted(method, serve_config(method, settings.speculative_config)) if said is None else said.tokens
    return None if tokens is None else DrafterLimit(tokens, (said and said.beyond) or beyond_of(method))


def _launch(
    backend: Backend, settings: BackendSettings, names: tuple[str, ...], port: int, run_dir: Path
) -> LaunchSpec:
    assert settings.serve is not None
    env = dict(settings.serve.env)
    if backend.api_key is not None:
        env["VLLM_API_KEY"] = backend.api_key  # command lines are visible to all users of the machine
    argv = vllm_serve_argv(
        command=_found(settings.serve.command, env),
        model=settings.serve.model,
        served_names=names,
        host=_HOST,
        port=port,
        method=backend.method,
        speculative_config=backend.speculative_config,
        draft_depth=backend.draft_depth,
        flags=settings.serve.flags,
    )
    return LaunchSpec(
        f"{backend.model}/{backend.name}",
        argv,
        (f"{backend.url}/health",),
        env,
        run_dir / f"{backend.model.replace('/', '_')}-{backend.name.replace('/', '_')}.log",
        settings.serve.startup_timeout_s,
    )


def _found(command: Sequence[str], env: Mapping[str, str]) -> Sequence[str]:
    """Return a command; if it is not on PATH but next to this Python, where `[vllm]` puts it, return that path."""
    name, *rest = command
    if "/" in name or shutil.which(name, path=env.get("PATH")) is not None:
        return command
    beside = Path(sys.executable).parent / name
    return [str(beside), *rest] if beside.exists() else command


def _simulated(backend: Backend, settings: BackendSettings, names: tuple[str, ...], port: int) -> dict[str, Any]:
    assert settings.simulate is not None
    return {
        "name": f"{backend.model}/{backend.name}",
        "model": backend.model,
        "served_model_names": names,
        "method": backend.method,
        "speculative_config": {key: value for key, value in backend.speculative_config.items() if key != "method"},
        "calibration": settings.simulate.calibration,
        "host": _HOST,
        "port": port,
        "seed": settings.simulate.seed,
        "api_key": backend.api_key,
        "max_model_len": settings.simulate.max_model_len,
        "drafter_limit": backend.drafter_limit,
        "draft_depth": backend.draft_depth,
        "time_scale": settings.simulate.time_scale,
    }


def _launch_simulator(simulated: list[dict[str, Any]], run_dir: Path) -> LaunchSpec:
    path = run_dir / "simulator.json"
    path.touch(mode=0o600)  # it contains API keys
    path.write_bytes(orjson.dumps({"replicas": simulated}))
    return LaunchSpec(
        SIMULATOR,
        (sys.executable, "-m", "backends.simulator", str(path)),
        tuple(f"http://{_HOST}:{replica['port']}/health" for replica in simulated),
        {},
        run_dir / "simulator.log",
        startup_timeout_s=60.0,
        shutdown_timeout_s=5.0,
    )
