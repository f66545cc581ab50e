"""Changes the settings and replicas of a running gateway process, in two steps.

`prepare` does everything that may fail or take long, next to the running gateway. `Handover.commit` then swaps the
parts in one call on the event loop. Requests in flight keep the parts with which they began.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Final

from backends import background
from backends.backend import Backend, EngineChange
from backends.http.authorities import trusted
from backends.pool import Joining
from gateway.admin.policy_versions import PolicyVersions
from gateway.config.settings import PoolSettings
from gateway.gateway import Gateway, join
from gateway.relay.roles import Ongoing
from gateway.relay.waiting.queue import ModelQueue, without_bound
from gateway.routing.model import Model, Upstream
from gateway.routing.sticky import Home
from gateway.service.assembly import health_rules, learners_of, max_in_flight, queue_bounds, successor

_FIRST_PROBE_S = 1.0
"""Most seconds that a change waits for the first probes of new replicas, so that they can take requests immediately."""

_TAKEN_OVER: Final = ("weight", "context_range", "flags")
"""Attributes that may change without making it another replica (`is_same_replica`)."""


async def prepare(
    gateway: Gateway, settings: PoolSettings, backends: Sequence[Backend], admin_digest: bytes
) -> Handover:
    """Return a change to new settings and replicas, without applying it."""
    if any(backend.url.startswith("https:") for backend in backends):
        await asyncio.to_thread(trusted)
    later = successor(gateway, settings, backends, admin_digest)
    members = [upstream.backend for model in later.models.values() for upstream in model.upstreams.values()]
    present = {id(backend) for backend in gateway.pool}
    joining = await gateway.pool.probe(
        [backend for backend in members if id(backend) not in present], health_rules(settings), _FIRST_PROBE_S
    )
    planned = {(backend.model, backend.name): backend for backend in backends}
    return Handover(gateway, later, members, joining, planned)


@dataclass(slots=True)
class Handover:
    """A prepared change of a gateway process."""

    gateway: Gateway
    later: Gateway  # the parts to use from now on
    members: list[Backend]  # all replicas of the pool, in the order of the pool file
    joining: list[Joining]
    # The planned replicas, by model and name: one that stays adopts their `_TAKEN_OVER` attributes.
    planned: dict[tuple[str, str], Backend]

    def commit(self) -> None:
        """Replace the old parts by the new ones.

        Assignments, which cannot fail, come first; then their consequences, each even if another raises.
        """
        gateway, later, before = self.gateway, self.later, self.gateway.models
        retired = [
            upstream
            for model in before.values()
            for upstream in model.upstreams.values()
            if upstream not in _upstreams_of(later, model.name).values()
        ]
        keyring = later.relay.access.keyring
        keys = {client: keyring.named(client.name) for client in gateway.relay.access.keyring.clients}
        gone = Gone(
            gateway,
            [upstream.backend for upstream in retired],
            [name for name in before if name not in later.models],
            [client.name for client, later_one in keys.items() if later_one is None],
            [queue for name, queue in gateway.relay.queues.items() if name not in later.relay.queues],
            set(gateway.relay.exchanges),
        )
        versions, queues = self._kept_versions(), later.relay.queues
        steps: list[Callable[[], object]] = [
            partial(gateway.pool.update, self.members, self.joining, health_rules(later.settings)),
            partial(gateway.relay.limits.update, keyring.clients, max_in_flight(later.settings)),
            partial(gateway.peers.follow, keyring, later.models, {name: each.shares for name, each in queues.items()}),
            # The name now belongs to another key: reset its series.
            *(
                partial(gateway.metrics.forget, key=client.name)
                for client, later_one in keys.items()
                if later_one is not None and later_one.id != client.id
            ),
            *(partial(self._forget, upstream.backend, before) for upstream in retired),
            *(each.unfollow for each in gateway.policy_versions.values() if each not in versions.values()),
            *(each.follow for each in versions.values() if each not in gateway.policy_versions.values()),
            partial(gateway.state.follow, learners_of(later.models)),
            partial(gateway.metrics.set_present, gateway.pool, later.models),
            partial(join, gateway),
            # Requests in a removed queue are sent immediately.
            *(queue.dispatch for queue in gateway.relay.queues.values()),
            # Idle connections are closed now; the others close when their calls end.
            *(upstream.client.close for upstream in retired),
            *gateway.on_change,
        ]
        self._share_upstreams()
        for backend, name in product(self.members, _TAKEN_OVER):
            setattr(backend, name, getattr(self.planned[backend.model, backend.name], name))
        bounds = queue_bounds(later.settings)
        for name, queue in gateway.relay.queues.items():
            queue.bounds = bounds.get(name) or without_bound(queue.bounds)
        gateway.take_over(later, versions)
        if gone.backends or gone.models or gone.keys or gone.queues:
            gateway.leaving.append(gone.has_ended)
        for step in steps:
            with background.guarded("reloads"):
                step()

    def _share_upstreams(self) -> None:
        """Send the requests in flight, which keep the old models, to the current replicas."""
        gateway, later = self.gateway, self.later
        for name, model in later.models.items():
            for upstream in model.upstreams.values():  # its series may have been forgotten since `prepare`
                upstream.count_by(gateway.relay.metrics.of(upstream.backend))
            if (before := gateway.models.get(name)) is not None:
                model.take_over(before)

    def _kept_versions(self) -> dict[str, PolicyVersions]:
        """Return the versions of each model, reusing equal ones, which are already followed."""
        known = self.gateway.policy_versions
        return {
            name: known[name] if known.get(name) == versions else versions
            for name, versions in self.later.policy_versions.items()
        }

    def _forget(self, backend: Backend, before: Mapping[str, Model]) -> None:
        """Remove a replica that has left, or was replaced, from the policies."""
        if any(backend is member for member in self.members):
            return  # another client for the same replica
        self.gateway.relay.router.locations.forget(Home(backend.model, backend.name))
        returns = backend.name in _upstreams_of(self.later, backend.model)
        models = [models[backend.model] for models in (before, self.later.models) if backend.model in models]
        for model in models:
            model.forget(backend.name)
            if returns:
                model.engine_changed(backend.name, EngineChange.RELOAD)


def _upstreams_of(gateway: Gateway, model: str) -> Mapping[str, Upstream]:
    return gateway.models[model].upstreams if model in gateway.models else {}


@dataclass(slots=True)
class Gone:
    """Removed replicas, models, keys and queues, whose records and series stay until their requests have ended."""

    gateway: Gateway
    backends: list[Backend]
    models: list[str]
    keys: list[str]
    queues: list[ModelQueue]
    exchanges: set[Ongoing]  # all requests in flight when they were removed

    def has_ended(self) -> bool:
        """Return whether their requests have ended; if so, forget their records and series."""
        for queue in self.queues:  # requests may wait there for a replica that is up
            queue.end_overdue(time.perf_counter())
            queue.dispatch()
            waiting = queue.waiting + (now.waiting if (now := self.gateway.relay.queues.get(queue.model)) else 0)
            self.gateway.relay.metrics.refresh_queue(queue.model, waiting, queue.refused)
        self.exchanges &= self.gateway.relay.exchanges
        if self.exchanges:
            return False
        gateway, metrics = self.gateway, self.gateway.metrics
        present = {(backend.model, backend.name): backend.declared.method for backend in gateway.pool}
        for backend in self.backends:
            gateway.pool.forget(backend)
            name = (backend.model, backend.name)
            if present.get(name) is not backend.declared.method:
                metrics.forget(model=backend.model, backend=backend.name, method=backend.declared.method.value)
            if name not in present:
                metrics.forget(model=backend.model, backend=backend.name)
        for model in self.models:
            if model not in gateway.models:
                metrics.forget(model=model)
        for key in self.keys:
            if gateway.relay.access.keyring.named(key) is None:
                metrics.forget(key=key)
        return True
