"""Assembly of a gateway process from the settings of the pool file."""

from __future__ import annotations

import math
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backends.backend import Backend
from backends.http.client import Address, UpstreamClient
from backends.http.write_batch import WriteBatch
from backends.pool import HealthRules, Pool
from gateway.config.settings import KeySettings, PoolSettings
from gateway.http.cors import Cors
from gateway.http.paths import RelayedPaths
from gateway.recorder import Recorder
from gateway.relay.context import RelayContext, Timeouts
from gateway.relay.limits import Limits
from gateway.relay.observers import Follower
from gateway.relay.queue import ModelQueue, QueueBounds
from gateway.routing.access import Access
from gateway.routing.keys import Client, Keyring
from gateway.routing.model import Model, Upstream
from gateway.routing.router import Router
from gateway.service.default_temperature import assumed_temperature
from gateway.service.policy_versions import PolicyVersions, policy_versions_of
from gateway.shadow.replay import ShadowDrafting
from gateway.state import State
from gateway.state.location import open_store
from gateway.state.store import ERRORS
from gateway.telemetry.metrics import Metrics
from policies.guarded.policy import build
from policies.learned.shadow_drafting import shadow_arms
from policies.roles import Scoring, ShadowLearner, Stateful


@dataclass(slots=True)
class Gateway:
    """The parts of one gateway process.

    Attributes
    ----------
    models
        Models by name, in the order of the pool file.
    admin_access
        Who may ask for what at the admin address; None if it is the address of the clients.
    state
        State that outlives the process and is shared with others.
    policy_versions
        Rules and pins of each model with a learned policy.
    recorder
        Records finished requests; None if recording is off.
    shadow
        Shadow drafting of each model whose policy and pool make use of it.
    """

    settings: PoolSettings
    models: dict[str, Model]
    pool: Pool
    relay: RelayContext
    metrics: Metrics
    admin_access: Access | None
    state: State
    policy_versions: dict[str, PolicyVersions]
    recorder: Recorder | None
    shadow: dict[str, ShadowDrafting]


def assemble(settings: PoolSettings, backends: Sequence[Backend], admin_digest: bytes) -> Gateway:
    """Return the parts of a gateway process, without opening or starting anything.

    Parameters
    ----------
    backends
        All replicas of the pool, including those that the gateway has yet to start.
    admin_digest
        SHA-256 of the admin key.
    """
    metrics, writes = Metrics(), WriteBatch()
    tls = ssl.create_default_context() if any(backend.url.startswith("https:") for backend in backends) else None
    models: dict[str, Model] = {}
    by_name: dict[str, Model] = {}
    shadow: dict[str, ShadowDrafting] = {}
    recorder = None if settings.recorder is None else Recorder(settings.recorder)
    for name, model_settings in settings.models.items():
        policy = build(model_settings.policy.name, model_settings.policy.settings)
        upstreams = {
            backend.name: Upstream(
                backend,
                _client(backend, settings, tls, writes),
                metrics.bind(backend),
                drops_cors=settings.cors is not None,
            )
            for backend in backends
            if backend.model == name
        }
        model = models[name] = Model(name, policy, assumed_temperature(model_settings), upstreams)
        if (drafting := _shadow(model)) is not None:
            shadow[name] = drafting
        by_name |= dict.fromkeys((name, *model_settings.aliases), model)
    health, timeouts = settings.health, settings.timeouts
    rules = HealthRules(
        health.interval_s,
        health.timeout_s,
        eject_s=health.eject_s,
        eject_max_s=health.eject_max_s,
        slow_start_s=health.slow_start_s,
    )
    pool = Pool(backends, rules)
    access, admin_access = _access(settings, admin_digest)
    relay = RelayContext(
        Router(by_name, pool, 0 if recorder is None else recorder.keep_prompt_bytes),
        pool,
        access,
        Limits(settings.server.max_in_flight),
        metrics,
        Timeouts(timeouts.first_byte_s, timeouts.idle_s, math.inf if timeouts.total_s is None else timeouts.total_s),
        writes,
    )
    for name in models:
        metrics.retries_refused.labels(name)  # at once: the rate of a series that begins with an event misses that
    pool.on_down, pool.on_ready = relay.abandon, relay.ready
    relay.set_queues(_queues(settings))
    for name, model in models.items():
        followers: list[Follower | None] = [shadow.get(name), recorder]
        relay.followers[name] = [follower for follower in followers if follower is not None]
        if recorder is not None and isinstance(model.policy, Scoring):
            model.policy.explain_candidates = True
    state = _state(settings, models, metrics)
    policy_versions = policy_versions_of(models, state.documents)
    for versions in policy_versions.values():
        versions.follow()
    return Gateway(settings, models, pool, relay, metrics, admin_access, state, policy_versions, recorder, shadow)


def _access(settings: PoolSettings, admin_digest: bytes) -> tuple[Access, Access | None]:
    """Return the access at the address of the clients, and at the admin address if there is one."""
    keyring = Keyring([(key.digest or b"", _client_of(key)) for key in settings.keys], admin_digest)
    paths = RelayedPaths(settings.paths)
    cors = None if settings.cors is None else Cors(**settings.cors.model_dump())
    if settings.admin.listen is None:
        return Access(keyring, paths, cors), None
    metrics = {"/metrics"}
    closed = {"/admin"} | (metrics if settings.admin.metrics else set())
    closed_at_admin = {"/v1/models"} | (set() if settings.admin.metrics else metrics)
    return Access(keyring, paths, cors, closed), Access(keyring, None, closed=closed_at_admin)


def _queues(settings: PoolSettings) -> dict[str, ModelQueue]:
    """Return the queue of each model that has one, with this worker's part of its bounds."""
    workers = settings.server.workers
    return {
        name: ModelQueue(
            name,
            QueueBounds(
                math.ceil(queue.max_in_flight_per_backend / workers),
                math.ceil(queue.max_waiting / workers),
                math.ceil(queue.max_waiting_mib * 2**20 / workers),
                queue.max_wait_s,
                queue.pass_priority,
            ),
        )
        for name, model in settings.models.items()
        if (queue := model.queue) is not None
    }


def _state(settings: PoolSettings, models: Mapping[str, Model], metrics: Metrics) -> State:
    store = open_store(settings.state)
    learners = {
        name: policy.statistics for name, model in models.items() if isinstance(policy := model.policy, Stateful)
    }
    return State(store, learners, None if store is None else metrics.bind_state(store.kind, ERRORS))


def _shadow(model: Model) -> ShadowDrafting | None:
    policy = model.policy
    backends = [upstream.backend for upstream in model.upstreams.values()]
    arms = shadow_arms((each.method, each.num_speculative_tokens, each.speculative_config) for each in backends)
    if not isinstance(policy, ShadowLearner) or policy.shadow.sample == 0 or not arms or len(backends) < 2:
        return None
    return ShadowDrafting(policy, policy.shadow, arms)


def _client(backend: Backend, settings: PoolSettings, tls: ssl.SSLContext | None, writes: WriteBatch) -> UpstreamClient:
    address, connect_s = Address.parse(backend.url), settings.timeouts.connect_s
    return UpstreamClient(address, connect_timeout_s=connect_s, tls=tls if address.tls else None, writes=writes)


def _client_of(key: KeySettings) -> Client:
    return Client(
        key.name,
        frozenset(key.models) if key.models is not None else None,
        key.may_override,
        key.requests_per_minute,
        key.tokens_per_minute,
        key.max_in_flight,
        None if key.slo is None or key.slo.ttft_ms is None else 1e-3 * key.slo.ttft_ms,
        None if key.slo is None or key.slo.tpot_ms is None else 1e-3 * key.slo.tpot_ms,
        key.admin,
        key.priority,
    )
