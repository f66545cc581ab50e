"""Assembly of a gateway process from the settings of the pool file."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from backends.backend import Backend, EngineChange
from backends.health import Books, HealthRules
from backends.http.address import Address
from backends.http.client import UpstreamClient
from backends.http.wire import WriteBatch
from backends.pool import Listener, Pool
from gateway.admin.policy_versions import policy_versions_of
from gateway.config.settings import KeySettings, ModelSettings, PoolSettings, SloSettings
from gateway.config.settings.queue import QueueSettings
from gateway.gateway import Gateway, Reload, Room, join, rooms
from gateway.http.cors import Cors
from gateway.peers.exchange import PeerExchange
from gateway.peers.peers import MOST_PROMPTS, Peers
from gateway.relay.context import RelayContext, Timeouts
from gateway.relay.limits import Limits
from gateway.relay.waiting.queue import ModelQueue
from gateway.routing.access import Access
from gateway.routing.keys import Client, Keyring
from gateway.routing.model import Model, Upstream
from gateway.routing.router import Router, Sent, Slo
from gateway.routing.series import RequestSeries
from gateway.routing.sticky import ResponseLocations
from gateway.service.default_temperature import assumed_temperature, known_temperature
from gateway.service.stores import open_lives, open_store, read_launched
from gateway.state.sync import State
from gateway.telemetry.registry import Registry
from policies.build import build
from policies.features.request import RequestFeatures
from policies.policy import Policy
from policies.roles import Heir
from policies.statistics import Statistics


class ReplicaEvents(Listener):
    """Passes each event on to the part that handles it, as of the last reload."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def went_down(self, backend: Backend) -> None:
        """Retry the requests that wait for the first byte there."""
        self._gateway.relay.abandon(backend)

    def became_ready(self, backend: Backend) -> None:
        """Send it waiting requests."""
        self._gateway.relay.ready(backend)

    def was_ejected(self, backend: Backend, duration_s: float, reason: str) -> None:
        """Report the ejection to the peers."""
        self._gateway.peers.note_ejection(backend, duration_s, reason)

    def engine_changed(self, backend: Backend, change: EngineChange) -> None:
        """Invalidate what the policy has learned of the engine that changed."""
        self._gateway.models[backend.model].engine_changed(backend.name, change)

    def difference_changed(self, backend: Backend) -> None:
        """Rescale the tokens per step that answers show to those that the engine counts."""
        found = backend.difference
        self._gateway.models[backend.model].correct(backend.name, 1.0 if found is None else found.counted / found.shown)

    def reported_implausible(self, backend: Backend, what: str) -> None:
        """Count and log the report."""
        self._gateway.relay.metrics.note_implausible(backend, what)

    def books(self, backend: Backend) -> Books:
        """Return what the requests in flight show about it."""
        return self._gateway.relay.books(backend)


def assemble(
    settings: PoolSettings,
    backends: Sequence[Backend],
    admin_digest: bytes,
    *,
    metrics: Registry | None = None,
    run_dir: Path | None = None,
    reload: Reload | None = None,
) -> Gateway:
    """Return the parts of a gateway process, without opening or starting anything."""
    metrics, writes = metrics or Registry(), WriteBatch()
    series = RequestSeries(metrics)
    pool, limits = Pool(backends, health_rules(settings)), Limits(max_in_flight(settings))
    kinds = [kind for kind in rooms() if kind.is_on(settings)]
    access, admin_access = _access(settings, admin_digest, kinds)
    models: dict[str, Model] = {}
    for name, of_model in settings.models.items():
        members = [each for each in backends if each.model == name]
        upstreams = {each.name: _upstream(each, settings, series, writes) for each in members}
        policy = build(of_model.policy.name, of_model.policy.settings)
        models[name] = _model(name, of_model, policy, assumed_temperature(of_model), upstreams)
        series.retries_refused.labels(name)  # created now: the rate of a series that starts with an event misses it
    queues = {name: ModelQueue(name, bounds) for name, bounds in queue_bounds(settings).items()}
    locations, sent = ResponseLocations(), deque[tuple[Backend, RequestFeatures]](maxlen=MOST_PROMPTS)
    peers = Peers(pool, limits, locations, sent)
    peers.follow(access.keyring, models, {name: queue.shares for name, queue in queues.items()})
    lives = open_lives(settings, run_dir, peers.writer)
    metrics.gauge("gateway_peers")  # 0 for a process without peers
    router = _router(settings, models, pool, locations, sent if lives else None)
    state = State(open_store(settings.state), learners_of(models), metrics)
    policy_versions = policy_versions_of(models, state.documents)
    for versions in policy_versions.values():
        versions.follow()
    gateway = Gateway(
        settings,
        models,
        pool,
        RelayContext(router, access, _timeouts(settings), queues, pool, limits, series, writes),
        metrics,
        admin_access,
        state,
        peers,
        [PeerExchange(peers, live, metrics) for live in lives],
        policy_versions,
        reload=reload,
        launched=dict if run_dir is None else functools.partial(read_launched, run_dir),
    )
    pool.listen(ReplicaEvents(gateway))
    gateway.rooms.extend([kind(gateway) for kind in kinds])
    join(gateway)
    return gateway


def successor(gateway: Gateway, settings: PoolSettings, backends: Sequence[Backend], admin_digest: bytes) -> Gateway:
    """Return the parts of a running gateway under new settings: only what depends on these is new.

    A replica that stays keeps its object, its connections, and what is known about it; a model keeps its policy, with
    what it has learned, and its counts; a queue keeps its requests. The running gateway is not changed here.
    """
    relay = gateway.relay
    access, admin_access = _access(settings, admin_digest, [type(room) for room in gateway.rooms])
    present = [_kept(each, gateway.pool) for each in backends]
    connected: dict[int, Upstream] = {}  # by the `id` of the replica's object
    if _of_connections(gateway.settings) == _of_connections(settings):
        connected = {id(each.backend): each for model in gateway.models.values() for each in model.upstreams.values()}
    models: dict[str, Model] = {}
    for name, of_model in settings.models.items():
        before, members = gateway.models.get(name), [each for each in present if each.model == name]
        upstreams = {
            each.name: connected.get(id(each)) or _upstream(each, settings, relay.metrics, relay.writes)
            for each in members
        }
        if before is None:
            policy, temperature = build(of_model.policy.name, of_model.policy.settings), assumed_temperature(of_model)
        else:
            policy, temperature = _policy_after(before, gateway.settings.models[name], of_model)
        models[name] = _model(name, of_model, policy, temperature, upstreams, before)
        relay.metrics.retries_refused.labels(name)
    queues = {name: relay.queues.get(name) or ModelQueue(name, each) for name, each in queue_bounds(settings).items()}
    router = _router(settings, models, gateway.pool, relay.router.locations, relay.router.sent)
    return replace(
        gateway,
        settings=settings,
        models=models,
        relay=replace(relay, router=router, access=access, timeouts=_timeouts(settings), queues=queues),
        admin_access=admin_access,
        policy_versions=policy_versions_of(models, gateway.state.documents),
    )


def max_in_flight(settings: PoolSettings) -> int | None:
    """Return a worker's share of the limit on requests in flight."""
    server = settings.server
    return None if server.max_in_flight is None else math.ceil(server.max_in_flight / server.workers)


def health_rules(settings: PoolSettings) -> HealthRules:
    """Return the rules by which a replica is taken out of service."""
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
    """Return whether two backends are the same replica, ignoring states and settings that may change."""
    speculation = ("declared", "declared_limit", "speculative_config", "draft_depth")
    identity = ("name", "model", "url", "api_key", "simulated", "launched", *speculation)
    return all(getattr(one, field) == getattr(other, field) for field in identity)


def _kept(backend: Backend, pool: Pool) -> Backend:
    """Return the running gateway's object for a replica, with its state, load and requests, if it has one."""
    return next((known for known in pool.of(backend.model) if is_same_replica(known, backend)), backend)


def _upstream(backend: Backend, settings: PoolSettings, series: RequestSeries, writes: WriteBatch) -> Upstream:
    connect_timeout_s, keep_alive_s, drops_cors = _of_connections(settings)
    address = Address.parse(backend.url)
    client = UpstreamClient(address, connect_timeout_s=connect_timeout_s, keep_alive_s=keep_alive_s, writes=writes)
    return Upstream(backend, client, series.of(backend), drops_cors=drops_cors)


def _of_connections(settings: PoolSettings) -> tuple[float, float, bool]:
    """Return the settings that upstreams depend on: two timeouts, and whether CORS headers are dropped."""
    return settings.timeouts.connect_s, settings.timeouts.keep_alive_s, settings.cors is not None


def _model(
    name: str,
    settings: ModelSettings,
    policy: Policy,
    temperature: float,
    upstreams: dict[str, Upstream],
    before: Model | None = None,
) -> Model:
    """Return a model, with the counts of the running one."""
    rescue, ask_usage = settings.rescue, settings.ask_usage
    if before is None:
        return Model(name, policy, temperature, upstreams, rescue=rescue, ask_usage=ask_usage)
    counts = before.traffic, before.fallback, before.parts, before.troubles
    return Model(name, policy, temperature, upstreams, *counts, rescue=rescue, ask_usage=ask_usage)


def _policy_after(before: Model, old: ModelSettings, settings: ModelSettings) -> tuple[Policy, float]:
    """Return the policy of a model that stays, with what the running one has learned, and its default temperature."""
    policy = before.policy
    if old.policy != settings.policy:
        policy = build(settings.policy.name, settings.policy.settings)
        if isinstance(policy, Heir):
            try:
                policy.take_over(before.policy)
            except Exception as error:  # noqa: BLE001 -- it starts from nothing
                before.fallback.note(policy.name, "take_over", error)
                policy = build(settings.policy.name, settings.policy.settings)
    is_asked = known_temperature(old) is None is known_temperature(settings)
    return policy, before.default_temperature if is_asked else assumed_temperature(settings)


def _router(
    settings: PoolSettings, models: Mapping[str, Model], pool: Pool, locations: ResponseLocations, sent: Sent | None
) -> Router:
    by_name = {alias: models[name] for name, each in settings.models.items() for alias in (name, *each.aliases)}
    slo_classes = {name: _slo_of(slo) for name, slo in settings.slo_classes.items()}
    return Router(by_name, pool, settings.server.max_body_values, locations, sent, slo_classes)


def _access(settings: PoolSettings, admin_digest: bytes, kinds: Sequence[type[Room]]) -> tuple[Access, Access | None]:
    """Return the access rules of the clients' address, and of the admin address if there is one."""
    answered = {path: most_bytes for kind in kinds for path, most_bytes in kind.client_paths(settings).items()}
    keyring = Keyring([(key.digest or b"", _client_of(key, settings)) for key in settings.keys], admin_digest)
    cors = None if settings.cors is None else Cors(settings.cors.origins)
    public = tuple(path for kind in kinds for path in kind.public_paths(settings))
    pages = {kind.page.path for kind in kinds if kind.page is not None}
    off = {kind.page.path for kind in kinds if kind.page is not None and not kind.shows_page(settings)}
    if settings.admin.listen is None:
        return Access(keyring, settings.paths, cors, off, public, answered, pages), None
    at_admin, at_clients = ({"/metrics"}, set[str]()) if settings.admin.metrics else (set[str](), {"/metrics"})
    closed = {"/admin"} | pages | at_admin
    return (
        Access(keyring, settings.paths, cors, closed, answered=answered, pages=pages),
        Access(keyring, (), closed={"/v1/models"} | off | at_clients, public=public, pages=pages),
    )


def queue_bounds(settings: PoolSettings) -> dict[str, QueueSettings]:
    """Return a worker's part of the queue bounds of each model with a queue."""
    workers, queues = settings.server.workers, {name: model.queue for name, model in settings.models.items()}
    return {name: queue.part(workers) for name, queue in queues.items() if queue is not None}


def _slo_of(slo: SloSettings | None) -> Slo:
    ttft_ms, tpot_ms = (None, None) if slo is None else (slo.ttft_ms, slo.tpot_ms)
    return None if ttft_ms is None else 1e-3 * ttft_ms, None if tpot_ms is None else 1e-3 * tpot_ms


def _client_of(key: KeySettings, settings: PoolSettings) -> Client:
    slo_ttft_s, slo_tpot_s = _slo_of(settings.slo_classes.get(key.slo_class or "", key.slo))
    return Client(
        name=key.name,
        models=None if key.models is None and key.adapters is None else frozenset(key.models or ()),
        adapters=None if key.adapters is None else frozenset(key.adapters),
        may_override=key.may_override,
        admin=key.admin,
        requests_per_minute=key.requests_per_minute,
        tokens_per_minute=key.tokens_per_minute,
        max_in_flight=key.max_in_flight,
        slo_ttft_s=slo_ttft_s,
        slo_tpot_s=slo_tpot_s,
        slo_class=key.slo_class or "",
        priority=key.priority,
        weight=key.weight,
        tenant_header=(key.tenant_header or "").encode(),
    )
