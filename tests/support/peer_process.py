"""A gateway process as its peers know it: replicas, limits and reports, without HTTP."""

from __future__ import annotations

from collections.abc import Callable

from backends.backend import Backend, State
from backends.engine import Said
from backends.engine_metrics import EngineMetrics
from backends.health import HealthRules
from backends.pool import Pool
from backends.probe import ProbeResult
from backends.speculation import Method
from gateway.peers.peers import Peers
from gateway.relay.limits import Limits
from gateway.routing.keys import Client, Keyring
from gateway.routing.model import Model
from gateway.routing.sticky import ResponseLocations
from policies.balancing.lmetric import LMetric
from policies.load import LoadMeter
from policies.load_policy import LoadSettings

TEAM_KEY = b"digest"
(TEAM,) = Keyring([(TEAM_KEY, Client("team", requests_per_minute=60))]).clients


class PeerProcess:
    """One gateway process, without its network."""

    def __init__(self, clock: Callable[[], float], host: str = "host", url: str = "http://vllm:8000") -> None:
        self.backends = [Backend(name, "m", Method.BASELINE, f"{url}{name}") for name in "12"]
        self.pool = Pool(self.backends, HealthRules(strikes=1))
        for backend in self.backends:
            backend.state = State.UP
        self.limits = Limits(clock=clock)
        self.locations = ResponseLocations()
        self.policy = LMetric(LoadSettings(seed=1))
        keyring = Keyring([(TEAM_KEY, TEAM)])
        models = {"m": Model("m", self.policy, 1.0, {})}
        self.peers = Peers(self.pool, self.limits, keyring, self.locations, models, clock, host)

    def load(self) -> list[int]:
        """Return the requests on each replica, as policies see them."""
        return LoadMeter().counts(self.backends)

    def scrape(self, *in_engine: int) -> None:
        """Read the metrics of the engines."""
        for backend, running in zip(self.backends, in_engine, strict=True):
            result = ProbeResult(said=Said(), engine=EngineMetrics(running=running))
            self.pool._judge(self.pool.watch(backend), result)
