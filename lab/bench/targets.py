"""What is measured: endpoints by their address, and the replicas of a pool, each started for itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import ValidationError

from backends.http.client import Address
from backends.launch.supervisor import Launcher, LaunchError
from backends.speculation import Method, SpeculativeConfig, num_speculative_tokens
from backends.validation import UsageError, issues_of
from gateway.config.settings import BackendSettings, ModelSettings, PoolSettings
from gateway.service.replicas import plan
from lab.bench.settings import BenchSettings, named_url, unknown

_LOOK_S = 0.2
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Base:
    """Where an endpoint is.

    Parameters
    ----------
    prefix
        What stands before `/v1` in its paths; mostly nothing.
    """

    address: Address
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Read an address as a person writes it, with `/v1` at its end or not.

        Raises
        ------
        ValueError
            If it is none.
        """
        if url.startswith("unix:"):
            return cls(Address.parse(url))
        try:
            address = Address.parse(url)
            parts = urlsplit(url)
        except ValueError:
            raise ValueError("expected http://host:port, https://host:port or unix:/path/to.sock") from None
        if parts.query or parts.fragment or parts.username is not None:
            raise ValueError("expected an address alone: no query, no user; keys go with --api-key")
        return cls(address, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def url(self) -> str:
        """The address as a URL, for clients that know no Unix sockets a stand-in for one."""
        scheme = "https" if self.address.tls else "http"
        return f"{scheme}://{self.address.authority.decode()}{self.prefix}"


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to measure.

    Parameters
    ----------
    name
        Unique; what tables and plots call it.
    model
        What to ask for; None asks for the first model that it lists.
    method, k
        How it speculates, and how many tokens a step at most; None where that is not known.
    url
        Where it is; None for a replica that is started.
    pool
        A pool with this replica alone, for one that is started.
    """

    name: str
    model: str | None = None
    method: Method | None = None
    k: int | None = None
    simulated: bool = False
    url: str | None = None
    api_key: str | None = None
    pool: PoolSettings | None = None


def endpoint_targets(settings: BenchSettings) -> list[Target]:
    """Return the endpoints given by address; one named `baseline` is taken for one."""
    key = settings.api_key.get_secret_value() if settings.api_key is not None else None
    targets = []
    for place, given in enumerate(settings.url, 1):
        name, url = named_url(given, place, len(settings.url))
        method = Method(name) if name in set(Method) else None
        targets.append(Target(name, settings.model, method, 0 if method is Method.BASELINE else None, False, url, key))
    return targets


def pool_targets(settings: BenchSettings, pool: PoolSettings) -> list[Target]:
    """Return the replicas of a pool, baselines first, those that speculate once for every k.

    Raises
    ------
    UsageError
        A model or replica that the pool does not have; a k for a replica that cannot be given one.
    """
    if settings.model is not None and settings.model not in pool.models:
        raise unknown("--model", "model", settings.model, list(pool.models))
    models = {name: one for name, one in pool.models.items() if settings.model in {None, name}}
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
        one = backend if k is None else _with_k(backend, shown, k)
        alone = model.model_copy(update={"backends": {name: one}})
        targets.append(
            Target(
                shown if k is None else f"{shown} k={k}",
                model_name,
                one.method,
                num_speculative_tokens(one.method, one.speculative_config),
                one.simulate is not None,
                one.url,
                key,
                None if one.url is not None else pool.model_copy(update={"models": {model_name: alone}}),
            )
        )
    return targets


def _with_k(backend: BackendSettings, name: str, k: int) -> BackendSettings:
    config = backend.speculative_config
    if backend.url is not None:
        raise UsageError(f"--k: {name} runs already, at {backend.url}; k is set at start (--only leaves it out)")
    if config is not None and config.num_speculative_tokens_per_batch_size is not None:
        raise UsageError(f"--k: {name} has a k for each batch size (--only leaves it out)")
    given = config.model_dump(exclude_unset=True) if config is not None else {}
    try:
        changed = SpeculativeConfig.model_validate({**given, "num_speculative_tokens": k})
    except ValidationError as error:
        reasons = "; ".join(issue.message for issue in issues_of(error, SpeculativeConfig))
        raise UsageError(f"--k: {name} cannot have k={k}: {reasons}") from None
    return backend.model_copy(update={"speculative_config": changed})


@dataclass(frozen=True, slots=True)
class Reached:
    """A target that can be measured.

    Parameters
    ----------
    ready
        Waits until it answers again, should it have died and be started anew. Raises LaunchError if it does not.
    """

    base: Base
    ready: Callable[[], Awaitable[None]]


@contextlib.asynccontextmanager
async def reached(target: Target, run_dir: Path, say: Callable[[str], None]) -> AsyncIterator[Reached]:
    """Start a target if need be, wait until it answers, and yield where; stop it in the end.

    Raises
    ------
    LaunchError
        If it does not start.
    """
    if target.pool is None:
        assert target.url is not None
        yield Reached(Base.parse(target.url), _at_once)
        return
    replicas = plan(target.pool, run_dir)
    launcher = Launcher(replicas.launches)
    say(f"starting {target.name}")
    try:
        await launcher.start()
        await _until_ready(launcher)
        yield Reached(Base.parse(replicas.backends[0].url), lambda: _until_ready(launcher))
    finally:
        await launcher.stop()


async def _at_once() -> None:
    """Wait for nothing: an endpoint that others run is as it is."""


async def _until_ready(launcher: Launcher) -> None:
    """Wait as the launcher does, but not through more than a few deaths: what dies at start does so again."""
    waiting = asyncio.create_task(launcher.wait_ready())
    try:
        while not (await asyncio.wait({waiting}, timeout=_LOOK_S))[0]:
            if any(one.restarts >= _TRIES for one in launcher.status()):
                await launcher.wait_ready(0.0)  # raises, and tells what was logged
        await waiting
    except LaunchError as error:
        raise LaunchError(f"does not start:\n{str(error).partition(chr(10))[2]}") from None
    finally:
        waiting.cancel()
