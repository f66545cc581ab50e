"""A gateway process as its peers know it: replicas, limits and reports, without HTTP."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from backends.backend import Backend
from backends.engine import Said
from backends.engine_metrics import EngineMetrics
from backends.health import Health, HealthRules, State
from backends.pool import Listener, Pool
from backends.probe import ProbeResult
from backends.speculation import Method
from gateway.peers.peers import Peers
from gateway.relay.limits import Limits
from gateway.relay.waiting.shares import FairShares
from gateway.routing.keys import Client, Keyring
from gateway.routing.model import Model
from gateway.routing.router import Sent
from gateway.routing.sticky import ResponseLocations
from policies.balancing.lmetric import LMetric
from policies.load import LoadMeter
from policies.load_policy import LoadSettings

TEAM_KEY = b"digest"
(TEAM,) = Keyring([(TEAM_KEY, Client("team", requests_per_minute=60))]).clients


class PeerProcess(Listener):
    """One gateway process, without its network."""

    def __init__(self, clock: Callable[[], float], host: str = "host", url: str = "http://vllm:8000") -> None:
        self.backends = [Backend(name, "m", Method.BASELINE, f"{url}{name}") for name in "12"]
        self.pool = Pool(self.backends, HealthRules(strikes=1))
        for backend in self.backends:
            backend.health = Health(State.UP)
        self.limits = Limits(clock=clock)
        self.locations = ResponseLocations()
        self.policy = LMetric(LoadSettings(seed=1))
        keyring = self.keyring = Keyring([(TEAM_KEY, TEAM)])
        models = self.models = {"m": Model("m", self.policy, 1.0, {})}
        self.shares = FairShares()
        self.sent: Sent = deque()
        self.peers = Peers(self.pool, self.limits, self.locations, self.sent, clock, host)
        self.peers.follow(keyring, models, {})
        self.pool.listen(self)

    def was_ejected(self, backend: Backend, duration_s: float, reason: str) -> None:
        """Tell the peers of an ejection."""
        self.peers.note_ejection(backend, duration_s, reason)

    def answered_by_peers(self) -> tuple[float, float]:
        """Return the tokens and steps that the first replica has answered to peers."""
        return self.pool.watch(self.backends[0])._answered_by_peers

    def load(self) -> list[int]:
        """Return the requests on each replica, as policies see them."""
        return LoadMeter().counts(self.backends)

    def scrape(self, *in_engine: int) -> None:
        """Read the metrics of the engines."""
        for backend, running in zip(self.backends, in_engine, strict=True):
            result = ProbeResult(said=Said(), engine=EngineMetrics(running=running))
            self.pool._judge(self.pool.watch(backend), result)
