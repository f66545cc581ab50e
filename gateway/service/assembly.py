"""Putting a gateway process together from the pool file: the one place where everything meets."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backends.backend import Backend
from backends.http.client import Address, UpstreamClient
from backends.http.write_batch import WriteBatch
from backends.pool import HealthRules, Pool
from gateway.config.settings import KeySettings, PoolSettings
from gateway.recorder import Recorder
from gateway.relay.context import RelayContext, Timeouts
from gateway.relay.limits import Limits
from gateway.routing.keys import Client, Keyring, digest
from gateway.routing.model import Model, Upstream
from gateway.routing.router import Router
from gateway.service.policy_versions import PolicyVersions, pinnings
from gateway.shadow import ShadowDrafting
from gateway.state import State
from gateway.state.location import open_store
from gateway.state.store import ERRORS
from gateway.telemetry.metrics import Metrics
from policies.learned.shadow_drafting import shadow_arms
from policies.policy import policies


@dataclass(slots=True)
class Gateway:
    """The parts of one gateway process.

    Attributes
    ----------
    models
        By their own name, in the order of the pool file.
    admin_digest
        SHA-256 of the admin key.
    state
        What outlives the process and is shared with others.
    pinnings
        Rules from experience, and pins, of each model whose policy learns.
    """

    settings: PoolSettings
    models: dict[str, Model]
    pool: Pool
    relay: RelayContext
    metrics: Metrics
    admin_digest: bytes
    state: State
    pinnings: dict[str, PolicyVersions]


def assemble(settings: PoolSettings, backends: Sequence[Backend], admin_key: str) -> Gateway:
    """Build a gateway process; nothing is opened or started yet.

    Parameters
    ----------
    backends
        Every replica of the pool, those that the gateway starts with the address they will have.
    """
    metrics, writes = Metrics(), WriteBatch()
    tls = ssl.create_default_context() if any(one.url.startswith("https:") for one in backends) else None
    known_policies = policies()
    models: dict[str, Model] = {}
    by_name: dict[str, Model] = {}
    for name, model_settings in settings.models.items():
        policy = known_policies[model_settings.policy.name](model_settings.policy.settings)
        upstreams = {
            backend.name: Upstream(backend, _client(backend, settings, tls, writes), metrics.bind(backend))
            for backend in backends
            if backend.model == name
        }
        model = models[name] = Model(name, policy, model_settings.default_temperature, upstreams)
        model.shadow = _shadow(model)
        by_name |= dict.fromkeys((name, *model_settings.aliases), model)
    health, timeouts = settings.health, settings.timeouts
    rules = HealthRules(health.interval_s, health.timeout_s, eject_s=health.eject_s, eject_max_s=health.eject_max_s)
    pool = Pool(backends, rules)
    relay = RelayContext(
        Router(by_name, pool),
        pool,
        Keyring([_client_of(key) for key in settings.keys]),
        Limits(settings.server.max_in_flight),
        metrics,
        Timeouts(timeouts.first_byte_s, timeouts.idle_s),
        writes,
    )
    pool.on_down = relay.abandon
    if settings.recorder is not None:
        relay.recorder = Recorder(settings.recorder)
        for model in models.values():
            model.policy.explain_candidates = True
    state = _state(settings, models, metrics)
    pinned = pinnings(models, state.documents)
    for policy_versions in pinned.values():
        policy_versions.follow()
    return Gateway(settings, models, pool, relay, metrics, digest(admin_key), state, pinned)


def _state(settings: PoolSettings, models: Mapping[str, Model], metrics: Metrics) -> State:
    store = open_store(settings.state)
    learners = {name: model.policy.statistics for name, model in models.items() if model.policy.statistics is not None}
    return State(store, learners, None if store is None else metrics.bind_state(store.kind, ERRORS))


def _shadow(model: Model) -> ShadowDrafting | None:
    wanted = model.policy.shadow
    backends = [upstream.backend for upstream in model.upstreams.values()]
    arms = shadow_arms((one.method, one.num_speculative_tokens, one.speculative_config) for one in backends)
    if wanted is None or wanted.sample == 0 or not arms or len(backends) < 2:
        return None
    return ShadowDrafting(model.policy, wanted, arms)


def _client(backend: Backend, settings: PoolSettings, tls: ssl.SSLContext | None, writes: WriteBatch) -> UpstreamClient:
    address, connect_s = Address.parse(backend.url), settings.timeouts.connect_s
    return UpstreamClient(address, connect_timeout_s=connect_s, tls=tls if address.tls else None, writes=writes)


def _client_of(key: KeySettings) -> tuple[bytes, Client]:
    key_digest = digest(key.key.get_secret_value()) if key.key is not None else bytes.fromhex(key.sha256 or "")
    return key_digest, Client(
        key.name,
        frozenset(key.models) if key.models is not None else None,
        key.may_override,
        key.requests_per_minute,
        key.tokens_per_minute,
        key.max_in_flight,
        None if key.slo is None or key.slo.ttft_ms is None else 1e-3 * key.slo.ttft_ms,
        None if key.slo is None or key.slo.tpot_ms is None else 1e-3 * key.slo.tpot_ms,
    )
