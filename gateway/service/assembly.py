"""Assembly of a gateway process from the settings of the pool file."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from backends.backend import Backend
from backends.health import HealthRules
from backends.http.address import Address
from backends.http.client import UpstreamClient
from backends.http.wire import WriteBatch
from backends.pool import Pool
from gateway.admin.policy_versions import policy_versions_of
from gateway.config.settings import KeySettings, ModelSettings, PoolSettings, SloSettings
from gateway.gateway import Gateway, join, rooms
from gateway.http.cors import Cors
from gateway.peers.exchange import PeerExchange
from gateway.peers.peers import Peers
from gateway.relay.context import RelayContext, Timeouts
from gateway.relay.limits import Limits
from gateway.relay.queue import ModelQueue, QueueBounds
from gateway.routing.access import Access
from gateway.routing.keys import Client, Keyring
from gateway.routing.model import Model, Upstream
from gateway.routing.router import Router, Slo
from gateway.routing.series import RequestSeries
from gateway.service.default_temperature import assumed_temperature, must_ask
from gateway.service.stores import PEERS, open_live, open_store, read_launched
from gateway.state.sync import State
from gateway.telemetry.registry import Registry
from policies.build import build
from policies.roles import Heir
from policies.statistics import Statistics


def assemble(
    settings: PoolSettings,
    backends: Sequence[Backend],
    admin_digest: bytes,
    previous: Gateway | None = None,
    *,
    metrics: Registry | None = None,
    run_dir: Path | None = None,
) -> Gateway:
    """Return the parts of a gateway process, without opening or starting anything."""
    metrics = previous.metrics if previous is not None else metrics or Registry()
    writes = WriteBatch() if previous is None else previous.relay.writes
    series = RequestSeries(metrics)
    backends = [_kept(backend, previous) for backend in backends]
    pool = Pool(backends, health_rules(settings)) if previous is None else previous.pool
    models: dict[str, Model] = {}
    by_name: dict[str, Model] = {}
    for name, model_settings in settings.models.items():
        members = [backend for backend in backends if backend.model == name]
        upstreams = {each.name: _upstream(each, settings, series, writes, previous) for each in members}
        model = models[name] = _model(name, model_settings, upstreams, previous)
        by_name |= dict.fromkeys((name, *model_settings.aliases), model)
    if previous is None:
        kinds = [kind for kind in rooms() if kind.is_on(settings)]
    else:
        kinds = [type(room) for room in previous.rooms]
    answered = {path: most for kind in kinds for path, most in kind.client_paths(settings).items()}
    access, admin_access = _access(settings, admin_digest, answered)
    for name in models:
        series.retries_refused.labels(name)  # at once: the rate of a series that begins with an event misses that
    locations = None if previous is None else previous.relay.router.locations
    router = Router(by_name, pool, settings.server.max_body_values, locations)
    router.slo_classes = {name: _slo_of(slo) for name, slo in settings.slo_classes.items()}
    timeouts = _timeouts(settings)
    if previous is None:
        limits = Limits(max_in_flight(settings))
        relay = RelayContext(router, pool, access, limits, series, timeouts, writes)
        pool.on_down, pool.on_ready, pool.on_implausible = relay.abandon, relay.ready, series.note_implausible
        pool.books = relay.books
        relay.queues = _queues(settings, None)
        state = State(open_store(settings.state), learners_of(models), metrics)
        peers = Peers(pool, limits, access.keyring, router.locations, models)
        folder = None if run_dir is None or settings.server.workers == 1 else run_dir / PEERS
        live = open_live(settings.state, folder, peers.writer)
        router.sent = None if live is None else peers.sent
        exchange = PeerExchange(peers, live, metrics)
    else:
        for name in models.keys() & previous.models.keys():
            models[name].parts = previous.models[name].parts
        router.sent = previous.relay.router.sent
        relay = previous.relay.successor(router, access, timeouts)
        relay.queues = _queues(settings, previous)
        state, peers, exchange = previous.state, previous.peers, previous.peer_exchange
    peers.shares = {name: queue.shares for name, queue in relay.queues.items()}
    policy_versions = policy_versions_of(models, state.documents)
    if previous is None:
        for versions in policy_versions.values():
            versions.follow()
    gateway = Gateway(
        settings,
        models,
        pool,
        relay,
        metrics,
        admin_access,
        state,
        peers,
        exchange,
        policy_versions,
        launched=dict if run_dir is None else functools.partial(read_launched, run_dir),
    )
    if previous is None:
        gateway.rooms = [kind(gateway) for kind in kinds]
        join(gateway)
    return gateway


def max_in_flight(settings: PoolSettings) -> int | None:
    """Return a worker's share of the most requests in flight."""
    server = settings.server
    return None if server.max_in_flight is None else math.ceil(server.max_in_flight / server.workers)


def health_rules(settings: PoolSettings) -> HealthRules:
    """Return when a replica is taken out of service, by the settings."""
    return HealthRules(**settings.health.model_dump())


def _timeouts(settings: PoolSettings) -> Timeouts:
    timeouts = settings.timeouts
    return Timeouts(timeouts.first_byte_s, timeouts.idle_s, math.inf if timeouts.total_s is None else timeouts.total_s)


def learners_of(models: Mapping[str, Model]) -> dict[str, Statistics]:
    """Return the statistics of the models whose policy has some, by model."""
    return {
        name: statistics
        for name, model in models.items()
        if model.heir is not None and (statistics := model.heir.statistics) is not None
    }


def is_same_replica(one: Backend, other: Backend) -> bool:
    """Return whether two backends are the same replica, whatever their weights and states."""
    identity = ("name", "model", "said", "said_limit", "url", "speculative_config", "api_key", "simulated", "launched")
    return all(getattr(one, field) == getattr(other, field) for field in identity)


def _kept(backend: Backend, previous: Gateway | None) -> Backend:
    """Return the running gateway's object for a replica if it has one: with its state, load and requests."""
    for known in () if previous is None else previous.pool.of(backend.model):
        if is_same_replica(known, backend):
            return known
    return backend


def _upstream(
    backend: Backend, settings: PoolSettings, series: RequestSeries, writes: WriteBatch, previous: Gateway | None
) -> Upstream:
    """Return the upstream of a backend: the running one if its settings are the same."""
    if previous is not None and _of_clients(previous.settings) == _of_clients(settings):
        before = previous.models.get(backend.model)
        known = None if before is None else before.upstreams.get(backend.name)
        if known is not None and known.backend is backend:
            return known
    client = UpstreamClient(
        Address.parse(backend.url),
        connect_timeout_s=settings.timeouts.connect_s,
        keep_alive_s=settings.timeouts.keep_alive_s,
        writes=writes,
    )
    return Upstream(backend, client, series.of(backend), drops_cors=settings.cors is not None)


def _of_clients(settings: PoolSettings) -> tuple[float, float, bool]:
    """Return the settings that upstreams depend on."""
    return settings.timeouts.connect_s, settings.timeouts.keep_alive_s, settings.cors is not None


def _model(name: str, settings: ModelSettings, upstreams: dict[str, Upstream], previous: Gateway | None) -> Model:
    """Return a model, with what the running one has learned and counts."""
    rescue, ask_usage = settings.rescue, settings.ask_usage
    before = None if previous is None else previous.models.get(name)
    temperature = assumed_temperature(settings)
    if previous is None or before is None:
        policy = build(settings.policy.name, settings.policy.settings)
        return Model(name, policy, temperature, upstreams, rescue=rescue, ask_usage=ask_usage)
    old = previous.settings.models[name]
    policy = before.policy
    if old.policy != settings.policy:
        policy = build(settings.policy.name, settings.policy.settings)
        if isinstance(policy, Heir):
            try:
                policy.take_over(before.policy)
            except Exception as error:  # noqa: BLE001 -- it begins with nothing, as at a start
                before.fallback.note(policy.name, "take_over", error)
                policy = build(settings.policy.name, settings.policy.settings)
    if must_ask(old) and must_ask(settings):
        temperature = before.default_temperature
    counts = before.traffic, before.fallback
    return Model(name, policy, temperature, upstreams, *counts, rescue=rescue, ask_usage=ask_usage)


def _access(settings: PoolSettings, admin_digest: bytes, answered: Mapping[str, int]) -> tuple[Access, Access | None]:
    """Return the access at the address of the clients, and at the admin address if there is one."""
    keyring = Keyring([(key.digest or b"", _client_of(key, settings)) for key in settings.keys], admin_digest)
    cors = None if settings.cors is None else Cors(settings.cors.origins)
    nothing, page, metrics = set[str](), {"/dashboard"}, {"/metrics"}
    public = "/admin/dashboard/" if settings.dashboard.public else None
    off = nothing if settings.dashboard.enabled else page
    if settings.admin.listen is None:
        return Access(keyring, settings.paths, cors, off, public, answered), None
    closed = {"/admin"} | page | (metrics if settings.admin.metrics else nothing)
    closed_at_admin = {"/v1/models"} | off | (nothing if settings.admin.metrics else metrics)
    return Access(keyring, settings.paths, cors, closed, answered=answered), Access(
        keyring, (), closed=closed_at_admin, public=public
    )


def queue_bounds(settings: PoolSettings) -> dict[str, QueueBounds]:
    """Return the bounds of the queue of each model that has one: this worker's part of them."""
    workers = settings.server.workers
    return {
        name: QueueBounds(
            math.ceil(queue.max_in_flight_per_backend / workers),
            math.ceil(queue.max_waiting / workers),
            math.ceil(queue.max_waiting_mib * 2**20 / workers),
            queue.max_wait_s,
            queue.pass_priority,
        )
        for name, model in settings.models.items()
        if (queue := model.queue) is not None
    }


def _queues(settings: PoolSettings, previous: Gateway | None) -> dict[str, ModelQueue]:
    """Return the queue of each model that has one: the running one, with what waits in it."""
    running = {} if previous is None else previous.relay.queues
    return {name: running.get(name) or ModelQueue(name, bounds) for name, bounds in queue_bounds(settings).items()}


def _slo_of(slo: SloSettings | None) -> Slo:
    ttft_ms, tpot_ms = (None, None) if slo is None else (slo.ttft_ms, slo.tpot_ms)
    return None if ttft_ms is None else 1e-3 * ttft_ms, None if tpot_ms is None else 1e-3 * tpot_ms


def _client_of(key: KeySettings, settings: PoolSettings) -> Client:
    return Client(
        key.name,
        None if key.models is None and key.adapters is None else frozenset(key.models or ()),
        key.may_override,
        key.requests_per_minute,
        key.tokens_per_minute,
        key.max_in_flight,
        *_slo_of(settings.slo_classes.get(key.slo_class or "", key.slo)),
        key.slo_class or "",
        key.admin,
        key.priority,
        key.weight,
        (key.tenant_header or "").encode(),
        None if key.adapters is None else frozenset(key.adapters),
    )
