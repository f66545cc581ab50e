"""A gateway process, and the rooms that join it, each of which may be missing.

A room observes exchanges, answers the gateway's own paths, or runs in the background. Each folder of `gateway.rooms`
has one in its `room.py`, next to its section of the pool file (`settings.py`), its series (`series.yaml`) and its
commands (`command.py`). A package adds its own through the entry point group `speculation_gateway.rooms`; each entry
names a subclass of `Room`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeGuard

from backends import background
from backends.pool import Pool
from gateway import rooms as packages
from gateway.admin.policy_versions import PolicyVersions
from gateway.config.settings import PoolSettings
from gateway.peers.exchange import PeerExchange
from gateway.peers.peers import Peers
from gateway.relay.context import RelayContext, RescuerFor
from gateway.relay.observers import Follower
from gateway.relay.roles import Reporting
from gateway.routing.access import Access
from gateway.routing.model import Model
from gateway.routing.router import Narrowing
from gateway.state.sync import State
from gateway.telemetry.registry import Registry

if TYPE_CHECKING:
    from fastapi import FastAPI
    from pydantic import BaseModel
    from starlette.types import ASGIApp

    from gateway.config.settings import TlsSettings

_GROUP = "speculation_gateway.rooms"


Trial = tuple[str, str, dict[str, Any] | None]
"""Model, replica, and the speculative config to try; empty for no speculation, None to end the trial."""


class Reload(Protocol):
    """Reloads the pool file."""

    async def __call__(self, *, dry_run: bool, trial: Trial | None = None) -> list[str]:
        """Return what changed, or would change, one line per key; raise `ReloadError` if the file is refused."""


@dataclass(slots=True)
class Gateway:
    """The parts of one gateway process."""

    settings: PoolSettings
    models: dict[str, Model]  # models by name, in the order of the pool file
    pool: Pool
    relay: RelayContext
    metrics: Registry
    admin_access: Access | None  # access rules of the admin address; None if clients share it
    state: State  # state that outlives the process and is shared with others
    peers: Peers  # the other processes that serve the pool, as known to this one
    peer_exchanges: Sequence[PeerExchange]  # exchanges of reports with them
    policy_versions: dict[str, PolicyVersions]  # rules and pins of each model with a learned policy
    # One for each replaced relay: frees what it held, and returns whether its requests have ended.
    leaving: list[Callable[[], bool]] = field(default_factory=list)
    # Reloads the pool file, or reports what that would change; None if this process was started without one.
    reload: Reload | None = None
    # Returns the processes of the replicas that the gateway started: `pid`, `restarts`, ... by `model/backend`.
    launched: Callable[[], Mapping[str, Mapping[str, Any]]] = dict
    rooms: list[Room] = field(default_factory=list)  # rooms that have joined it
    # Called after each change of the other attributes.
    on_change: list[Callable[[], None]] = field(default_factory=list)

    def take_over(self, later: Gateway, versions: dict[str, PolicyVersions]) -> None:
        """Adopt the parts of a later gateway that depend on its settings, and these policy versions."""
        self.settings, self.models, self.relay = later.settings, later.models, later.relay
        self.admin_access, self.policy_versions = later.admin_access, versions

    def is_ready(self) -> bool:
        """Return whether each model has a replica that is up."""
        return all(self.pool.up(name) for name in self.models)


class Page(NamedTuple):
    """A page for browsers, to which `/` redirects; it owns all paths below its own."""

    path: str
    title: str  # as printed at the start


class Beside(NamedTuple):
    """An address at which a room serves something other than HTTP."""

    name: str
    address: str  # host and port
    option: str  # setting of the address
    tls: TlsSettings | None
    line: str  # printed at the start, with the address in place of braces


class Companion(Protocol):
    """The server at that address."""

    async def start(self, opened: socket.socket) -> None:
        """Serve at the address of a bound socket."""

    def drain(self) -> None:
        """Signal that no more requests should be sent."""

    async def stop(self, grace_s: float) -> None:
        """Accept nothing more, and wait for requests in flight."""


class Room:
    """Base class of the rooms of a gateway process. Each method does nothing unless a subclass overrides it.

    Attributes
    ----------
    gateway
        The gateway process; its attributes change with its settings.
    running
        Its current background task, which `stop` cancels.
    order
        Its place among the rooms of `gateway.rooms`: those with lower numbers observe first.
    work
        The kinds of its background work, whose failures are counted.
    restart_keys
        Prefixes of the keys of the pool file that it reads only at the start.
    rescuer_for
        Returns what resumes a request's stream at another backend; None if it does not do that.
    reporter
        Reports requests to the outside; None if it does not do that.
    own_keys
        Keys of a backend that concern only this room, not the engine's process.
    command_section
        Section of the pool file that only its command uses.
    keep_prompt_bytes
        Size of the largest body whose prompt is kept until the exchange ends.
    keeps_texts
        Whether it keeps texts of requests, which operators may then see.
    needs_scores
        Whether it needs the scores of all candidates in decisions.
    page
        Its page for browsers.
    """

    order: ClassVar[int] = 0
    work: ClassVar[tuple[str, ...]] = ()
    restart_keys: ClassVar[tuple[str, ...]] = ()
    rescuer_for: RescuerFor | None = None
    reporter: Reporting | None = None
    own_keys: ClassVar[tuple[str, ...]] = ()
    command_section: ClassVar[str] = ""
    keep_prompt_bytes: int = 0
    keeps_texts: bool = False
    needs_scores: bool = False
    page: ClassVar[Page | None] = None

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.running: asyncio.Task[None] | None = None

    @staticmethod
    def is_on(settings: PoolSettings) -> bool:
        """Return whether it joins a process that starts with these settings."""
        return True

    @staticmethod
    def problem(settings: PoolSettings) -> str:
        """Return why the room cannot do what the settings ask; empty if it can. Must not create anything."""
        return ""

    @staticmethod
    def drawn(settings: PoolSettings) -> Mapping[str, BaseModel]:
        """Return sections of the settings with values drawn at the start, which all workers keep until the end."""
        return {}

    @staticmethod
    def client_paths(settings: PoolSettings) -> Mapping[str, int]:
        """Return the client paths that it answers, including all below them, and the largest body of each in bytes."""
        return {}

    @staticmethod
    def shows_page(settings: PoolSettings) -> bool:
        """Return whether its page is currently served."""
        return True

    @staticmethod
    def public_paths(settings: PoolSettings) -> tuple[str, ...]:
        """Return prefixes of paths below `/admin` that may be read without a key."""
        return ()

    @staticmethod
    def beside(settings: PoolSettings) -> Beside | None:
        """Return the address of its companion, if it has one."""
        return None

    def companion(self, own: ASGIApp) -> Companion | None:
        """Return the server at the address `beside`; `own` answers the gateway's own paths."""
        return None

    def add_routes(self, app: FastAPI) -> None:
        """Add routes; `gateway.routing.access` checks their keys."""

    def follow(self) -> Mapping[str, Follower]:
        """Return the follower of each model's exchanges; called at the start, and after each change of the settings."""
        return {}

    def narrow(self) -> Mapping[str, Narrowing]:
        """Return what narrows each model's candidates before its policy chooses; called when `follow` is."""
        return {}

    def start(self) -> None:
        """Start the background work."""

    async def stop(self) -> None:
        """Stop the background work; called when no request is in flight."""
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)

    def tick(self) -> None:
        """Do periodic work, and update the series; called every half second, and before the series are read."""


def rooms() -> list[type[Room]]:
    """Return the rooms in the order in which they observe an exchange; those of other packages come last."""
    modules = [import_module(f"{packages.__name__}.{each.name}.room") for each in iter_modules(packages.__path__)]
    own = [each for module in modules for each in vars(module).values() if _is_room_of(module.__name__, each)]
    return [*sorted(own, key=lambda room: room.order), *(entry.load() for entry in entry_points(group=_GROUP))]


def _is_room_of(module: str, member: object) -> TypeGuard[type[Room]]:
    return isinstance(member, type) and issubclass(member, Room) and member.__module__ == module


def join(gateway: Gateway) -> None:
    """Connect the rooms to the exchanges of the current models."""
    rooms, relay = gateway.rooms, gateway.relay
    for model in gateway.models.values():
        if model.explainer is not None:
            model.explainer.explain_candidates = any(room.needs_scores for room in rooms)
    relay.router.keep_prompts(max((room.keep_prompt_bytes for room in rooms), default=0))
    followers: dict[str, list[Follower]] = {name: [] for name in gateway.models}
    narrowing: dict[str, Narrowing] = {}
    for room in rooms:
        with background.guarded("observers", of=type(room).__name__):
            for name, follower in room.follow().items():
                followers[name].append(follower)
            narrowing.update(room.narrow())
    rescuers = [room.rescuer_for for room in rooms if room.rescuer_for is not None]
    reporters = [room.reporter for room in rooms if room.reporter is not None]
    relay.join(followers, next(iter(rescuers), None), next(iter(reporters), None), narrowing)
