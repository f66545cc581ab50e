"""One model as the gateway serves it: its backends, its policy, its load."""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.backend import Backend
from backends.connection import UpstreamClient
from gateway.failsafe import Failsafe
from gateway.lookups import LookupReplay
from gateway.metrics import BackendMetrics
from gateway.traffic import Traffic
from policies.policy import Policy

_FIRST_GUESS_BYTES = 4.0  # of English text in a token of a vocabulary of 128k


@dataclass(slots=True)
class Upstream:
    """A backend with what the relay needs at hand to use it."""

    backend: Backend
    client: UpstreamClient
    metrics: BackendMetrics


@dataclass(slots=True)
class ServedModel:
    """A model by the name that clients ask for.

    Attributes
    ----------
    lookups
        Replays lookups on what was finished; None where the policy or the pool has no use for it.
    failsafe
        Chooses where the policy fails.
    bytes_per_token
        What a token of its streams measures, learned from those that end with a usage; used for those that do not.
    """

    name: str
    policy: Policy
    default_temperature: float
    upstreams: dict[str, Upstream]
    traffic: Traffic = field(default_factory=Traffic)
    lookups: LookupReplay | None = None
    failsafe: Failsafe = field(default_factory=Failsafe)
    bytes_per_token: float = _FIRST_GUESS_BYTES

    def learn_token_size(self, text_bytes: int, tokens: int) -> None:
        """Move the size of a token towards what a stream of known length shows (each counts for 2%)."""
        if tokens >= 16 and text_bytes > 0:
            self.bytes_per_token += 0.02 * (text_bytes / tokens - self.bytes_per_token)
