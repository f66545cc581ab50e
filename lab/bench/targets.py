"""Targets of a benchmark: endpoints given by URL, and the replicas of a pool, started one at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import ValidationError

from backends import background
from backends.http.client import Address
from backends.launch.supervisor import Launcher, LaunchError
from backends.speculation import Method, SpeculativeConfig, num_speculative_tokens
from backends.validation import UsageError, issues_of
from gateway.config.settings import BackendSettings, ModelSettings, PoolSettings
from gateway.service.replicas import plan
from lab.bench.settings import BenchSettings, named_url, unknown

_POLL_S = 0.2
_MAX_RESTARTS = 3


@dataclass(frozen=True, slots=True)
class BaseUrl:
    """The base URL of an endpoint.

    Examples
    --------
    >>> base = BaseUrl.parse("http://localhost:8000/team/v1")
    >>> base.prefix, base.url
    ('/team', 'http://localhost:8000/team')
    """

    address: Address
    prefix: str = ""  # part of its paths before `/v1`; usually empty

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse a URL with or without `/v1` at its end."""
        if url.startswith("unix:"):
            return cls(Address.parse(url))
        try:
            address = Address.parse(url)
            parts = urlsplit(url)
        except ValueError:
            raise ValueError("expected http://host:port, https://host:port or unix:/path/to.sock") from None
        if parts.query or parts.fragment or parts.username is not None:
            raise ValueError("expected an address without query and user; give keys with --api-key")
        return cls(address, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def url(self) -> str:
        """The address as a URL; a placeholder for a Unix socket, which has none."""
        scheme = "https" if self.address.tls else "http"
        return f"{scheme}://{self.address.authority.decode()}{self.prefix}"


@dataclass(frozen=True, slots=True)
class Target:
    """One target of a benchmark."""

    name: str  # unique name in tables and plots
    model: str | None = None  # model to request; None for the first that the target lists
    # method, k: speculation method, and maximum number of draft tokens per step; None if unknown.
    method: Method | None = None
    k: int | None = None
    simulated: bool = False
    url: str | None = None  # URL of a running endpoint; None for a replica to start
    api_key: str | None = None
    pool: PoolSettings | None = None  # pool with only this replica, for a replica to start


def endpoint_targets(settings: BenchSettings) -> list[Target]:
    """Return the endpoints given by URL; one whose name is a method is assumed to use that method."""
    key = settings.api_key.get_secret_value() if settings.api_key is not None else None
    targets = []
    for number, given in enumerate(settings.url, 1):
        name, url = named_url(given, number, len(settings.url))
        method = Method(name) if name in set(Method) else None
        targets.append(Target(name, settings.model, method, 0 if method is Method.BASELINE else None, False, url, key))
    return targets


def pool_targets(settings: BenchSettings, pool: PoolSettings) -> list[Target]:
    """Return the replicas of a pool, baselines first; each speculating replica once for every k."""
    if settings.model is not None and settings.model not in pool.models:
        raise unknown("--model", "model", settings.model, list(pool.models))
    models = {name: model for name, model in pool.models.items() if settings.model in {None, name}}
    names = [name for model in models.values() for name in model.backends]
    for name in settings.only:
        if name not in names:
            raise unknown("--only", "backend", name, names)
    targets: list[Target] = []
    for model_name, model in models.items():
        for name, backend in model.backends.items():
            if not settings.only or name in settings.only:
                shown = name if len(models) == 1 else f"{model_name}/{name}"
                targets += _replica_targets(settings, pool, (model_name, model), (name, shown, backend))
    return sorted(targets, key=lambda target: target.method is not Method.BASELINE)


def _replica_targets(
    settings: BenchSettings,
    pool: PoolSettings,
    of_model: tuple[str, ModelSettings],
    replica: tuple[str, str, BackendSettings],
) -> list[Target]:
    model_name, model = of_model
    name, shown, backend = replica
    key = backend.api_key.get_secret_value() if backend.api_key is not None else None
    targets = []
    for k in settings.k if backend.method is not Method.BASELINE and settings.k else (None,):
        changed = backend if k is None else _with_k(backend, shown, k)
        alone = model.model_copy(update={"backends": {name: changed}})
        targets.append(
            Target(
                shown if k is None else f"{shown} k={k}",
                model_name,
                changed.method,
                num_speculative_tokens(changed.method, changed.speculative_config),
                changed.simulate is not None,
                changed.url,
                key,
                None if changed.url is not None else pool.model_copy(update={"models": {model_name: alone}}),
            )
        )
    return targets


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


@dataclass(frozen=True, slots=True)
class RunningTarget:
    """A target that is running."""

    base: BaseUrl
    # Function that waits until the target answers, possibly after a restart. Raises LaunchError if it does not.
    ready: Callable[[], Awaitable[None]]


@contextlib.asynccontextmanager
async def running_target(target: Target, run_dir: Path, say: Callable[[str], None]) -> AsyncIterator[RunningTarget]:
    """Start a target if necessary, yield it once it answers, and stop it at the end."""
    if target.pool is None:
        assert target.url is not None
        yield RunningTarget(BaseUrl.parse(target.url), _no_wait)
        return
    replicas = plan(target.pool, run_dir)
    launcher = Launcher(replicas.launches)
    say(f"starting {target.name}")
    try:
        await launcher.start()
        await _until_ready(launcher)
        yield RunningTarget(BaseUrl.parse(replicas.backends[0].url), lambda: _until_ready(launcher))
    finally:
        await launcher.stop()


async def _no_wait() -> None:
    """Return at once: an endpoint given by URL is not restarted."""


async def _until_ready(launcher: Launcher) -> None:
    """Wait for the launcher, but fail after a few restarts: a replica that dies at start will die again."""
    waiting = background.start("lab", launcher.wait_ready(), raises=LaunchError)
    try:
        while not (await asyncio.wait({waiting}, timeout=_POLL_S))[0]:
            if any(process.restarts >= _MAX_RESTARTS for process in launcher.status()):
                await launcher.wait_ready(0.0)  # raises, with the end of the log
        await waiting
    except LaunchError as error:
        raise LaunchError(f"does not start:\n{str(error).partition(chr(10))[2]}") from None
    finally:
        waiting.cancel()
