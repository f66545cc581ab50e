"""Targets of a benchmark: endpoints given by URL, and the replicas of a pool, started one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import ValidationError

from backends.draft_schedule import draft_tokens
from backends.launch.supervisor import Launcher, LaunchError
from backends.speculation import Method, SpeculativeConfig, serve_config
from backends.validation import UsageError, did_you_mean, issues_of
from gateway.config.load import load_pool
from gateway.config.settings import BackendSettings, PoolSettings
from gateway.service.replicas import plan
from lab.bench.options import BenchOptions
from lab.live.endpoints import LiveEndpoint, endpoints_of
from lab.replay.command import served_model

_POLL_S = 0.2
_MAX_RESTARTS = 3


@dataclass(frozen=True, slots=True)
class Target:
    """One target of a benchmark."""

    replica: str  # name of the endpoint or backend
    # method, k: speculation method, and maximum number of draft tokens per step; None if unknown.
    method: Method | None
    k: int | None
    varies_k: bool = False  # whether there are targets of this replica with other k
    simulated: bool = False
    endpoint: LiveEndpoint | None = None  # None for a replica to start
    pool: PoolSettings | None = None  # pool with only this replica, for a replica to start

    @property
    def name(self) -> str:
        """Unique name in tables and plots."""
        return f"{self.replica} k={self.k}" if self.varies_k else self.replica


def targets_of(options: BenchOptions, ks: Sequence[int]) -> list[Target]:
    """Return the targets; of a pool the baselines first, and each speculating replica once for every k."""
    if bool(options.url) == (options.config is not None):
        raise UsageError("--config: measure endpoints or a pool, not both: give --url URL, or --config POOL")
    if options.config is None:
        if ks or options.only:
            raise UsageError(f"--{'k' if ks else 'only'}: requires --config, since it is about the replicas of a pool")
        targets = [_endpoint(one) for one in endpoints_of("--url", options.url, options.model, options.api_key)]
    else:
        targets = list(_replicas(options, options.config, ks))
        targets.sort(key=lambda target: target.method is not Method.BASELINE)
    if options.baseline is not None:
        _known("--baseline", "target", options.baseline, [target.name for target in targets])
    return targets


def _endpoint(endpoint: LiveEndpoint) -> Target:
    """Return the target of an endpoint; one whose name is a method is taken to use that method."""
    method = Method(endpoint.name) if endpoint.name in set(Method) else None
    return Target(endpoint.name, method, 0 if method is Method.BASELINE else None, endpoint=endpoint)


def _replicas(options: BenchOptions, config: Path, ks: Sequence[int]) -> Iterator[Target]:
    pool = load_pool(config)
    model, served = served_model(config, options.model)
    for name in options.only:
        _known("--only", "backend", name, list(served.backends))
    for name, backend in served.backends.items():
        if options.only and name not in options.only:
            continue
        varies_k = bool(ks) and backend.method is not Method.BASELINE
        key = backend.api_key.get_secret_value() if backend.api_key is not None else None
        for changed in [_with_k(backend, name, k) for k in ks] if varies_k else [backend]:
            drafted = draft_tokens(changed.method, serve_config(changed.method, changed.speculative_config))
            target = Target(name, changed.method, drafted, varies_k, changed.simulate is not None)
            if changed.url is not None:
                yield replace(target, endpoint=LiveEndpoint.of("--config", f"{name}={changed.url}", model, key))
            else:
                alone = served.model_copy(update={"backends": {name: changed}})
                yield replace(target, pool=pool.model_copy(update={"models": {model: alone}}))


def _with_k(backend: BackendSettings, name: str, k: int) -> BackendSettings:
    config = backend.speculative_config
    if backend.url is not None:
        raise UsageError(f"--k: {name} already runs at {backend.url}; k is set at start (exclude it with --only)")
    if config is not None and config.num_speculative_tokens_per_batch_size is not None:
        raise UsageError(f"--k: {name} has a k for each batch size (exclude it with --only)")
    given = config.model_dump(exclude_unset=True) if config is not None else {}
    try:
        changed = SpeculativeConfig.model_validate({**given, "num_speculative_tokens": k})
    except ValidationError as error:
        reasons = "; ".join(issue.message for issue in issues_of(error, SpeculativeConfig))
        raise UsageError(f"--k: {name} cannot have k={k}: {reasons}") from None
    return backend.model_copy(update={"speculative_config": changed})


def _known(option: str, kind: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise UsageError(f"{option}: no {kind} '{name}'; {did_you_mean(name, known)}")


@contextlib.asynccontextmanager
async def running(target: Target) -> AsyncIterator[LiveEndpoint]:
    """Start a target if necessary, yield its endpoint once it answers, and stop it at the end."""
    if target.endpoint is not None:
        yield target.endpoint
        return
    assert target.pool is not None
    with TemporaryDirectory(prefix="gateway-bench-") as folder:
        replicas = plan(target.pool, Path(folder))
        [model] = target.pool.models
        launcher = Launcher(replicas.launches)
        try:
            await launcher.start()
            await _wait_ready(launcher)
            url = replicas.backends[0].url
            yield replace(LiveEndpoint.of("--config", url, model, None), name=target.name)
        finally:
            await launcher.stop()


async def _wait_ready(launcher: Launcher) -> None:
    """Wait for the launcher, but fail after a few restarts: a replica that dies at start will die again."""
    while True:
        gives_up = any(process.restarts >= _MAX_RESTARTS for process in launcher.engines)
        try:
            await launcher.wait_ready(0.0 if gives_up else _POLL_S)
        except LaunchError as error:
            if gives_up:
                raise LaunchError(f"does not start:\n{str(error).partition(chr(10))[2]}") from None
        else:
            return
