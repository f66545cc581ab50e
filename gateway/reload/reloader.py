"""The reloader: reads the pool file again, tells what has changed, and has it applied as a whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from backends.validation import UsageError
from gateway.config.settings import PoolSettings
from gateway.gateway import Room
from gateway.reload.differences import differences, needs_restart

log = logging.getLogger(__name__)

_PAUSE_S = 0.2
"""Least seconds between two reloads that were not asked for at `/admin/reload`."""

Cause = Literal["signal", "admin", "file"]
Outcome = Literal["changed", "unchanged", "refused", "invalid", "failed"]


class ReloadError(Exception):
    """Raised if the pool file cannot be applied; nothing has changed then."""

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
        self._apply = apply  # puts other settings into effect; if it raises, those before are in effect
        self._on_end = on_end  # called with cause and outcome of each reload
        self._rooms = rooms  # which say what takes effect at a start only
        self._reads_one_at_a_time, self._one_at_a_time = asyncio.Lock(), asyncio.Lock()
        self._wanted: Cause | None = None
        self._is_wanted = asyncio.Event()

    def request(self, cause: Cause) -> None:
        """Reload soon; requests that come while one is waiting are served by the same reload."""
        self._wanted = cause
        self._is_wanted.set()

    async def run(self) -> None:
        """Reload whenever that was requested, until cancelled."""
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            with contextlib.suppress(ReloadError):  # logged
                await self.reload(self._wanted or "signal")
            await asyncio.sleep(_PAUSE_S)

    async def reload(self, cause: Cause, *, dry_run: bool = False) -> list[str]:
        """Read the pool file and apply it; return one line for each key that has changed."""
        async with self._reads_one_at_a_time:  # a file that does not answer holds up no `apply_again`
            try:
                return await self._reload(cause, dry_run=dry_run)
            except ReloadError as error:
                refused = error
            except Exception:
                log.exception("a reload has failed")
                refused = ReloadError("failed", "The settings could not be applied; see the log.")
            if not dry_run:
                log.warning("reload (%s): nothing was changed: %s", cause, refused.message)
                self._on_end(cause, refused.outcome)
            raise refused

    async def apply_again(self) -> None:
        """Apply the settings in effect, since the replicas that were found have changed; raise what `apply` raises."""
        async with self._one_at_a_time:
            await self._apply(self._settings)

    async def _reload(self, cause: Cause, *, dry_run: bool) -> list[str]:
        try:
            settings = await asyncio.to_thread(self._load)
        except UsageError as error:
            raise ReloadError("invalid", str(error)) from None
        async with self._one_at_a_time:
            return await self._reload_with(settings, cause, dry_run=dry_run)

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
