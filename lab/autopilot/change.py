"""Changing replicas one after another, so that the fleet carries its load meanwhile and no request is lost."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lab.autopilot.gateway_admin import UP, ChangeError, GatewayAdmin
from lab.autopilot.journal import Change, Journal, Speculation, Step
from lab.autopilot.restart import Restart

_SOON_S = 5.0


class PostponedError(Exception):
    """A change is not begun, or not continued, because the fleet needs all its replicas now."""


@dataclass(frozen=True, slots=True)
class Floor:
    """What must stay up while a replica is out.

    Parameters
    ----------
    share
        Least share of the model's replicas that must be up.
    load
        Most requests per second, as a share of what the others can serve.
    capacity
        Returns the requests per second that some replicas can serve.
    rate
        Returns the requests per second that arrive at present.
    """

    share: float
    load: float
    capacity: Callable[[Mapping[str, Speculation]], float]
    rate: Callable[[], float]

    def objection(
        self, backends: Mapping[str, Mapping[str, Any]], out: str, fleet: Mapping[str, Speculation]
    ) -> str | None:
        """Return why a replica cannot be taken out now; None if it can."""
        down = [name for name, one in backends.items() if one["state"] not in UP]
        if out in down:
            return f"{out} is {backends[out]['state']}"
        left = len(backends) - len(down) - 1
        least = max(1, math.ceil(self.share * len(backends)))
        if left < least:
            return f"{left} of {len(backends)} replicas would be up, and {least} must be"
        others = {name: runs for name, runs in fleet.items() if name != out and name not in down}
        waiting = sum((backends[name]["engine"] or {}).get("waiting", 0) for name in others)
        if waiting > len(others):
            return f"{waiting} requests wait at the other replicas"
        rate, capacity = self.rate(), self.capacity(others)
        if rate > self.load * capacity:
            return (
                f"{rate:.2f} requests a second arrive, and the others serve {capacity:.2f}: more than {self.load:.0%}"
            )
        return None


@dataclass(frozen=True, slots=True)
class Changer:
    """Changes the replicas of one model.

    Parameters
    ----------
    restarts
        How each replica is restarted; those that are missing cannot be.
    journal
        Written before and after each step.
    say
        Told of each step.
    drain_s
        Longest wait for the requests of a drained replica.
    patience_s
        Longest wait for a moment in which the floor allows a restart.
    """

    gateway: GatewayAdmin
    floor: Floor
    restarts: Mapping[str, Restart]
    journal: Journal
    say: Callable[[str], None]
    move: bool = False
    drain_s: float = 300.0
    patience_s: float = 600.0

    async def check(self, change: Change) -> None:
        """Check what can be checked before anything changes.

        Raises
        ------
        ChangeError
            If a replica cannot be restarted, the gateway refuses, or runs other settings than the file has.
        """
        fixed = [step.backend for step in change.steps if step.backend not in self.restarts]
        if fixed:
            raise ChangeError(
                f"{', '.join(fixed)} cannot be restarted by the autopilot: it restarts replicas with `serve`, and "
                "Deployments named with --deployment"
            )
        if lines := await self.gateway.reload(dry_run=True):
            raise ChangeError(
                f"the pool file has changes that the gateway does not serve yet; reload it: {'; '.join(lines)}"
            )
        backends = await self.gateway.backends()
        for step in change.steps:
            if step.backend not in backends:
                raise ChangeError(f"the gateway has no backend {step.backend}")
        await self.gateway.try_out(change.steps[0].backend)

    async def make(self, change: Change, fleet: Mapping[str, Speculation]) -> None:
        """Change the replicas of a change that are not done, one at a time.

        Parameters
        ----------
        fleet
            What all replicas of the model run now.

        Raises
        ------
        ChangeError
            If a replica could not be changed. It runs as before again if that was possible; no further one is touched.
        PostponedError
            If the floor allowed no restart for too long. What has changed so far stays.
        """
        running = dict(fleet)
        while waiting := [number for number, step in enumerate(change.steps) if not step.done]:
            number = await asyncio.to_thread(self._next, change, waiting, running)
            step = change.steps[number]
            await self._until_allowed(step.backend, running)
            try:
                await self._drain(step.backend)
                await self._restart(step)
            except BaseException:  # the user's interrupt too
                with contextlib.suppress(ChangeError):  # the first one is told
                    await asyncio.shield(self.gateway.resume(step.backend))
                raise
            change.steps[number] = step.model_copy(update={"done": True})
            running[step.backend] = step.after
            self.journal.write()
        change.ended_s = time.time()
        self.journal.write()

    def _next(self, change: Change, waiting: list[int], running: Mapping[str, Speculation]) -> int:
        """Return the step of the replica without which the others serve most."""

        def without(number: int) -> float:
            out = change.steps[number].backend
            return self.floor.capacity({name: runs for name, runs in running.items() if name != out})

        return max(waiting, key=without) if len(waiting) > 1 else waiting[0]

    async def _until_allowed(self, backend: str, running: Mapping[str, Speculation]) -> None:
        end_s = time.monotonic() + self.patience_s
        said = ""
        while True:
            backends = await self.gateway.backends()
            objection = await asyncio.to_thread(self.floor.objection, backends, backend, running)
            if objection is None:
                return
            if time.monotonic() > end_s:
                raise PostponedError(f"{backend} is not restarted: {objection}")
            if not said:
                self.say(f"{backend} waits: {objection}")
                said = objection
            await asyncio.sleep(_SOON_S)

    async def _drain(self, backend: str) -> None:
        """Wait until a replica has no requests."""
        self.say(f"{backend}: draining")
        await self.gateway.drain(backend, move=self.move)
        await self.gateway.until(f"{backend} is drained", lambda found: _is_idle(found[backend]), self.drain_s)

    async def _restart(self, step: Step) -> None:
        """Restart a drained replica, and have it answer; put it back if it does not."""
        backend = step.backend
        try:
            await self._run(backend, step.after)
        except (ChangeError, ValueError) as error:
            self.say(f"{backend}: {error}; putting back {step.before}")
            try:
                await self._run(backend, step.before)
            except (ChangeError, ValueError) as second:
                raise ChangeError(f"{error}; {backend} could not be put back to {step.before}: {second}") from None
            raise ChangeError(f"{error}; {backend} runs {step.before} again") from None

    async def _run(self, backend: str, runs: Speculation) -> None:
        self.say(f"{backend}: restarting with {runs}")
        await self.restarts[backend](backend, runs)
        await self.gateway.try_out(backend)
        self.say(f"{backend}: runs {runs}")


def _is_idle(now: Mapping[str, Any]) -> bool:
    """Return whether no worker of the gateway, and nobody else, has a request at a replica."""
    engine = now["engine"] or {}
    busy = now["in_flight"] or now["others"] or engine.get("running") or engine.get("waiting")
    return now["state"] == "draining" and not busy
