"""Changing the settings and replicas of a running gateway process, in two steps.

`prepare` does everything that may fail or take long, beside the running gateway. `Change.commit` then puts the new
parts in place of the old ones, in one call on the event loop. Requests in flight keep the parts that they began with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from backends.backend import Backend, EngineChange
from backends.pool import Joining
from gateway.config.settings import PoolSettings
from gateway.relay.context import Ongoing
from gateway.relay.queue import UNBOUNDED
from gateway.routing.model import Upstream
from gateway.service.assembly import Gateway, assemble, explain_for, health_rules, learners_of, queue_bounds
from gateway.shadow.replay import ShadowDrafting
from policies.roles import EngineWatcher, Forgetful, Maintained

_FIRST_PROBE_S = 1.0
"""How long a change waits for the first probes of new replicas, so that those that answer take requests at once."""


async def prepare(gateway: Gateway, settings: PoolSettings, backends: Sequence[Backend], admin_digest: bytes) -> Change:
    """Return a change to other settings and replicas, which has changed nothing yet.

    Parameters
    ----------
    backends
        All replicas of the pool; those that are in it already may be other objects with the same settings.
    """
    later = assemble(settings, backends, admin_digest, gateway)
    members = [upstream.backend for upstreams in later.upstreams.values() for upstream in upstreams.values()]
    present = {id(backend) for backend in gateway.pool}
    joining = await gateway.pool.probe(
        [backend for backend in members if id(backend) not in present], health_rules(settings), _FIRST_PROBE_S
    )
    known = {id(model.policy) for model in gateway.models.values()}
    for model in later.models.values():
        if gateway.is_started and isinstance(model.policy, Maintained) and id(model.policy) not in known:
            await asyncio.to_thread(model.policy.warm_up)
    weights = {(backend.model, backend.name): backend.weight for backend in backends}
    return Change(gateway, later, members, joining, weights)


@dataclass(slots=True)
class Change:
    """A prepared change of a gateway process.

    Parameters
    ----------
    later
        The parts to use from now on.
    members
        All replicas of the pool, in the order of the pool file.
    weights
        Weights by model and name of the replica: the only setting that a replica changes without becoming another one.
    """

    gateway: Gateway
    later: Gateway
    members: list[Backend]
    joining: list[Joining]
    weights: dict[tuple[str, str], float]

    def commit(self) -> None:
        """Put the new parts in place of the old ones."""
        gateway, later = self.gateway, self.later
        retired = [
            upstream
            for name, upstreams in gateway.upstreams.items()
            for upstream in upstreams.values()
            if later.upstreams.get(name, {}).get(upstream.backend.name) is not upstream
        ]
        idle_shadows = [each for name, each in gateway.shadow.items() if later.shadow.get(name) is not each]
        for backend in self.members:
            backend.weight = self.weights[backend.model, backend.name]
        gateway.pool.update(self.members, self.joining, health_rules(later.settings))
        gateway.relay.limits.update(later.relay.access.keyring.clients, later.settings.server.max_in_flight)
        gateway.peers.follow(later.relay.access.keyring)
        self._replace_models(retired)
        keys = {key.name for key in later.settings.keys}
        gone = Gone(
            gateway,
            [upstream.backend for upstream in retired],
            [name for name in gateway.models if name not in later.models],
            [key.name for key in gateway.settings.keys if key.name not in keys],
            set(gateway.relay.exchanges),
        )
        for name, shadow in later.shadow.items():
            if gateway.shadow.get(name) is not shadow and gateway.is_started:
                shadow.start()
        gateway.settings, gateway.admin_digest = later.settings, later.admin_digest
        self._replace_queues()
        gateway.relay, gateway.admin_access = later.relay, later.admin_access
        gateway.models, gateway.upstreams, gateway.shadow = later.models, later.upstreams, later.shadow
        for upstreams in gateway.upstreams.values():
            for upstream in upstreams.values():  # since it was prepared, one of the same name may have been forgotten
                upstream.metrics = gateway.metrics.bind(upstream.backend)
        gateway.recorder = later.recorder
        if gone.is_anything():
            gateway.leaving.append(gone)
        explain_for(gateway.models, gateway.settings)
        gateway.metrics.set_present(gateway.pool)
        for upstream in retired:
            upstream.client.close()  # idle connections; the others close when their calls end
        for shadow in idle_shadows:
            _stop(shadow)
        for changed in gateway.on_change:
            changed()

    async def abandon(self) -> None:
        """Close what was prepared."""
        for each in self.joining:
            await each.probe.close()

    def _replace_queues(self) -> None:
        """Apply the new bounds to the requests that wait; those in a queue that is gone are sent at once."""
        bounds = queue_bounds(self.later.settings)
        self.gateway.pool.on_ready = self.later.relay.ready
        for name, queue in self.gateway.relay.queues.items():
            queue.bounds = bounds.get(name, UNBOUNDED)
            queue.dispatch()

    def _replace_models(self, retired: Sequence[Upstream]) -> None:
        """Point policies, rules and statistics to the new models."""
        gateway, later = self.gateway, self.later
        for upstream in retired:
            backend = upstream.backend
            if any(backend is member for member in self.members):
                continue  # another client for the same replica
            for models in (gateway.models, later.models):
                model = models.get(backend.model)
                if model is not None and isinstance(model.policy, Forgetful):
                    model.policy.forget(backend.name)
                returns = backend.name in later.upstreams.get(backend.model, {})
                if model is not None and returns and isinstance(model.policy, EngineWatcher):
                    model.policy.engine_changed(backend.name, EngineChange.RELOAD)
        for name, model in later.models.items():
            upstreams = later.upstreams[name]
            if (before := gateway.models.get(name)) is not None:
                # Requests in flight have the old model: they may be sent to the replicas that there are now.
                before.upstreams.clear()
                before.upstreams.update(upstreams)
                upstreams = before.upstreams
            model.upstreams = upstreams
            later.upstreams[name] = dict(upstreams)
        for name, versions in gateway.policy_versions.items():
            if name in later.policy_versions and later.policy_versions[name] == versions:
                later.policy_versions[name] = versions
            else:
                versions.unfollow()
        for versions in later.policy_versions.values():
            if versions not in gateway.policy_versions.values():
                versions.follow()
        gateway.policy_versions = later.policy_versions
        gateway.state.follow(learners_of(later.models))


class Gone:
    """Replicas, models and keys that were removed, whose records and series stay until their requests have ended.

    Parameters
    ----------
    exchanges
        All requests in flight when they were removed.
    """

    def __init__(
        self, gateway: Gateway, backends: list[Backend], models: list[str], keys: list[str], exchanges: set[Ongoing]
    ) -> None:
        self._gateway = gateway
        self._backends = backends
        self._models = models
        self._keys = keys
        self._exchanges = exchanges

    def is_anything(self) -> bool:
        """Return whether anything was removed."""
        return bool(self._backends or self._models or self._keys)

    def has_ended(self) -> bool:
        """Return whether the requests have ended, after forgetting what they were sent to."""
        self._exchanges &= self._gateway.relay.exchanges
        if self._exchanges:
            return False
        self._forget()
        return True

    def _forget(self) -> None:
        gateway, metrics = self._gateway, self._gateway.metrics
        present = {(backend.model, backend.name): backend.said.method for backend in gateway.pool}
        for backend in self._backends:
            gateway.pool.forget(backend)
            name = (backend.model, backend.name)
            if present.get(name) is not backend.said.method:
                metrics.forget(model=backend.model, backend=backend.name, method=backend.said.method.value)
            if name not in present:
                metrics.forget(model=backend.model, backend=backend.name)
        for model in self._models:
            if model not in gateway.models:
                metrics.forget(model=model)
        for key in self._keys:
            if gateway.relay.access.keyring.named(key) is None:
                metrics.forget(key=key)


_stopping: set[asyncio.Task[None]] = set()


def _stop(shadow: ShadowDrafting) -> None:
    task = asyncio.get_running_loop().create_task(asyncio.to_thread(shadow.stop))
    _stopping.add(task)
    task.add_done_callback(_stopping.discard)
