"""One model as the gateway serves it: its backends, its policy, its load."""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.backend import Backend
from backends.http.client import AnswerHead, UpstreamClient
from gateway.http.headers import gateway_lines, lines_for_client
from gateway.routing.arrival_rate import Traffic
from gateway.shadow import ShadowDrafting
from gateway.telemetry.fallback import Fallback
from gateway.telemetry.metrics import BackendMetrics
from policies.policy import Decision, Policy

_FIRST_GUESS_BYTES = 4.0  # of English text in a token of a vocabulary of 128k


class Upstream:
    """A backend with what the relay needs at hand to use it.

    Attributes
    ----------
    answers_json
        Whether the answer whose head was last given to `lines_of_answer` is JSON as it stands, not compressed.
    """

    __slots__ = ("_answer", "_answer_lines", "_choice_lines", "answers_json", "backend", "client", "metrics")

    def __init__(self, backend: Backend, client: UpstreamClient, metrics: BackendMetrics) -> None:
        self.backend = backend
        self.client = client
        self.metrics = metrics
        self.answers_json = False
        self._answer: AnswerHead | None = None
        self._answer_lines = b""
        self._choice_lines: dict[tuple[str, str], bytes] = {}  # by policy and reason: there are few of them

    def lines_of_answer(self, head: AnswerHead) -> bytes:
        """Write the headers of an answer as they go on to the client, less its length; written once for all alike."""
        if head is not self._answer:
            named = dict(head.headers)
            self._answer = head
            self._answer_lines = lines_for_client([one for one in head.headers if one[0] != b"content-length"])
            kind = named.get(b"content-type", b"")
            self.answers_json = kind.startswith(b"application/json") and b"content-encoding" not in named
        return self._answer_lines

    def lines_of_choice(self, decision: Decision, retried_from: str) -> bytes:
        """Write the headers that say why a request came here."""
        policy, reason = decision.policy, decision.reason
        lines = None if retried_from else self._choice_lines.get((policy, reason))
        if lines is None:
            backend = self.backend
            lines = gateway_lines(backend.name, backend.method, policy, reason, backend.simulated, retried_from)
            if not retried_from:
                self._choice_lines[policy, reason] = lines
        return lines


@dataclass(slots=True)
class Model:
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
    shadow: ShadowDrafting | None = None
    fallback: Fallback = field(default_factory=Fallback)
    bytes_per_token: float = _FIRST_GUESS_BYTES

    def learn_token_size(self, text_bytes: int, tokens: int) -> None:
        """Move the size of a token towards what a stream of known length shows (each counts for 2%)."""
        if tokens >= 16 and text_bytes > 0:
            self.bytes_per_token += 0.02 * (text_bytes / tokens - self.bytes_per_token)
