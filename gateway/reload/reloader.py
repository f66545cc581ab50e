"""Reloads the pool file: reads it, reports what changed, and applies it as a whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from pydantic import ValidationError

from backends.speculation import Method
from backends.validation import UsageError, issues_of
from gateway.config.settings import BackendSettings, PoolSettings
from gateway.gateway import Room, Trial
from gateway.reload.differences import differences, needs_restart

log = logging.getLogger(__name__)

_PAUSE_S = 0.2
"""Least seconds between two reloads that `/admin/reload` did not request."""

Cause = Literal["signal", "admin", "file"]
Outcome = Literal["changed", "unchanged", "refused", "invalid", "failed"]


class ReloadError(Exception):
    """Raised if the pool file cannot be applied; nothing has changed."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(outcome, message)
        # The label value in metrics: `invalid` (the file has errors), `refused` (a change needs a restart) or `failed`.
        self.outcome = outcome
        self.message = message


class Reloader:
    """Reloads the pool file, one reload after another."""

    def __init__(
        self,
        load: Callable[[], PoolSettings],
        settings: PoolSettings,
        apply: Callable[[PoolSettings], Awaitable[None]],
        on_end: Callable[[Cause, Outcome], None],
        rooms: Sequence[type[Room]],
    ) -> None:
        self._load = load  # reads the pool file; called in a thread
        self._settings = settings  # the settings in effect
        self._apply = apply  # puts settings into effect; if it raises, the old ones stay in effect
        self._on_end = on_end  # called with cause and outcome of each reload
        self._rooms = rooms  # they say which keys take effect only at a start
        # Current trials, by model and name: the settings tried, and those in the file when it began.
        self._tried: dict[tuple[str, str], tuple[BackendSettings, BackendSettings]] = {}
        self._reads_one_at_a_time, self._one_at_a_time = asyncio.Lock(), asyncio.Lock()
        self._wanted: Cause | None = None
        self._is_wanted = asyncio.Event()

    def request(self, cause: Cause) -> None:
        """Reload soon; one reload serves all requests that arrive before it starts."""
        self._wanted = cause
        self._is_wanted.set()

    async def run(self) -> None:
        """Reload whenever requested, until cancelled."""
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            with contextlib.suppress(ReloadError):  # logged
                await self.reload(self._wanted or "signal")
            await asyncio.sleep(_PAUSE_S)

    async def reload(self, cause: Cause, *, dry_run: bool = False, trial: Trial | None = None) -> list[str]:
        """Read the pool file and apply it; return one line per key that changed.

        With a trial, a replica that the gateway starts speculates differently from the file, until the trial is ended
        or the gateway exits.
        """
        async with self._reads_one_at_a_time:  # a disk that hangs must not block `apply_again`
            before = {**self._tried}
            try:
                if trial is not None:
                    self._try(trial)
                lines = await self._reload(cause, dry_run=dry_run)
                if dry_run:  # a trial may have ended in this dry run
                    self._tried = before
                return lines
            except ReloadError as error:
                self._tried, refused = before, error
            except Exception:
                self._tried = before
                log.exception("a reload has failed")
                refused = ReloadError("failed", "The settings could not be applied; see the log.")
            if not dry_run:
                log.warning("reload (%s): nothing was changed: %s", cause, refused.message)
                self._on_end(cause, refused.outcome)
            raise refused

    async def apply_again(self) -> None:
        """Reapply the settings in effect, since discovered replicas have changed; raise what `apply` raises."""
        async with self._one_at_a_time:
            await self._apply(self._settings)

    async def _reload(self, cause: Cause, *, dry_run: bool) -> list[str]:
        try:
            settings = await asyncio.to_thread(self._load)
        except UsageError as error:
            raise ReloadError("invalid", str(error)) from None
        async with self._one_at_a_time:
            return await self._reload_with(self._with_tried(settings), cause, dry_run=dry_run)

    def _try(self, trial: Trial) -> None:
        model, name, config = trial
        known = self._settings.models[model].backends.get(name) if model in self._settings.models else None
        if known is None or known.serve is None:
            raise ReloadError("refused", f"the gateway does not start the engine of {name} itself")
        if config is None:
            self._tried.pop((model, name), None)
            return
        options = {key: value for key, value in config.items() if key != "method"} or None
        said = {"method": config.get("method", "baseline"), "speculative_config": options, "serve": {"model": "any"}}
        try:
            trial_of = BackendSettings.model_validate(said)
        except ValidationError as error:
            raise ReloadError("invalid", "; ".join(map(str, issues_of(error, BackendSettings)))) from None
        if trial_of.method is Method.CUSTOM_CLASS:  # who may change the pool may not run code
            raise ReloadError("refused", "a custom class is code: only the pool file can name it")
        _, before = self._tried.get((model, name), (None, known))
        self._tried[model, name] = trial_of, before

    def _with_tried(self, settings: PoolSettings) -> PoolSettings:
        """Return the settings with the trials applied, except to replicas that the file has changed since."""
        models = {**settings.models}
        for (model, name), (trial, before) in [*self._tried.items()]:
            backends = models[model].backends if model in models else {}
            own = backends.get(name)
            if own is None or own.serve is None or _way(own) != _way(before):
                del self._tried[model, name]
                continue
            tried = own.model_copy(update=dict(zip(_WAY, _way(trial), strict=True)))
            models[model] = models[model].model_copy(update={"backends": {**backends, name: tried}})
        return settings.model_copy(update={"models": models})

    async def _reload_with(self, settings: PoolSettings, cause: Cause, *, dry_run: bool) -> list[str]:
        lines = differences(self._settings, settings)
        if refused := needs_restart(self._settings, settings, self._rooms):
            raise ReloadError("refused", f"these keys take effect at the next start only: {'; '.join(refused)}")
        if dry_run:
            return lines
        if lines:
            await self._apply(settings)
            self._settings = settings
        if lines or cause != "file":
            log.info("reload (%s): %s", cause, f"{len(lines)} changes" if lines else "nothing has changed")
        for line in lines:
            log.info("reload: %s", line)
        self._on_end(cause, "changed" if lines else "unchanged")
        return lines


_WAY = "method", "speculative_config"


def _way(backend: BackendSettings) -> tuple[Any, ...]:
    return tuple(getattr(backend, name) for name in _WAY)
