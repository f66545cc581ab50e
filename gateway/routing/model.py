"""A served model: its backends, its policy and its load."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from backends.backend import Backend, EngineChange
from backends.health import State
from backends.http.address import Address
from backends.http.client import Call
from backends.http.receiver import AnswerHead, HeaderList
from gateway.dialects.asked_usage import StreamHabits
from gateway.http.cors import without_cors
from gateway.http.headers import gateway_lines, is_json, lines_for_client, media_type
from gateway.routing.access import RequestHeaders
from gateway.routing.fallback import Fallback
from gateway.routing.keys import Client
from gateway.routing.series import BackendSeries
from policies.features.parts import PartTokens, StoredTokens
from policies.features.prompt import Prompt
from policies.features.request import RequestFeatures, describe
from policies.guarded.guardrail import Guardrail
from policies.learned.detector import Detector
from policies.policy import Decision, Outcome, Policy
from policies.roles import Explainer, Heir, Informed, Learner, Maintained, Price
from policies.trouble.troubles import Troubles

_INITIAL_PACE_S: Final = 0.02  # until there is an answer
_PACES: Final = 50
_LEAST_PACE_S: Final = 1e-4
_MOST_PER_CHUNK: Final = 256.0
"""Bounds on what an answer's usage can claim about its pace and its chunks; no engine comes near them."""


class BackendClient(Protocol):
    """Sends requests to a backend, as `UpstreamClient` does."""

    address: Address

    def send(self, call: Call) -> Call:
        """Send a request; its answer goes to its receiver."""

    def close(self) -> None:
        """Close the connections as their calls end."""


class Upstream:
    """A backend with its HTTP client and its metrics, as the relay uses it."""

    def __init__(
        self, backend: Backend, client: BackendClient, metrics: BackendSeries, *, drops_cors: bool = False
    ) -> None:
        self.backend = backend
        self._drops_cors = drops_cors  # whether the gateway does CORS, so that the engine's CORS headers are dropped
        self.client = client
        self.metrics = metrics
        self.pace_s = _INITIAL_PACE_S  # mean seconds per token of recent answers, from arrival to end
        self._paces = 0
        # Mean of recent streams, by whether they offered tools: the parser of tool calls joins chunks.
        self._tokens_per_chunk: dict[bool, float] = {}
        self._answer: AnswerHead | None = None
        self._answer_lines = b"", False
        self._choice_lines: dict[tuple[str, str], bytes] = {}  # cache by policy and reason; there are few

    def count_by(self, metrics: BackendSeries) -> None:
        """Use these series from now on."""
        self.metrics = metrics

    @property
    def habits(self) -> StreamHabits:
        """How its engine writes streams."""
        engine = self.backend.engine
        if engine.habits is None:
            engine.habits = StreamHabits()
        habits: StreamHabits = engine.habits
        return habits

    def learn_pace(self, seconds: float, tokens: float) -> None:
        """Update the mean seconds per token with an answer, at a weight of 2% once there are many."""
        if tokens >= 1.0:
            self._paces = min(self._paces + 1, _PACES)
            self.pace_s += (max(_LEAST_PACE_S, seconds / tokens) - self.pace_s) / self._paces

    def learn_chunks(self, tokens: int, chunks: int, *, tools: bool) -> None:
        """Update the mean tokens per chunk with a stream whose tokens are known, at a weight of 5%."""
        mean = min(tokens / chunks, _MOST_PER_CHUNK)
        known = self._tokens_per_chunk.get(tools, mean)
        self._tokens_per_chunk[tools] = known + 0.05 * (mean - known)

    def estimate(self, chunks: int, *, tools: bool) -> int:
        """Estimate the tokens in a number of chunks, from its streams or its engine's counters."""
        return round(chunks * max(1.0, self._tokens_per_chunk.get(tools) or self.backend.load.tokens_per_step))

    def lines_for_client(self, headers: HeaderList) -> bytes:
        """Return the header lines of an answer for the client."""
        kept = without_cors(headers) if self._drops_cors else headers
        return lines_for_client(kept, self.client.address.authority)

    def answer_of(self, head: AnswerHead) -> tuple[bytes, bool]:
        """Return the header lines of an answer without the content length, and whether it is uncompressed JSON.

        The result for the last head is cached.
        """
        if head is not self._answer:
            by_name = dict(head.headers)
            lines = self.lines_for_client([header for header in head.headers if header[0] != b"content-length"])
            is_plain_json = (
                is_json(media_type(by_name.get(b"content-type", b""))) and b"content-encoding" not in by_name
            )
            self._answer, self._answer_lines = head, (lines, is_plain_json)
        return self._answer_lines

    def lines_of_choice(self, decision: Decision, retried_from: str) -> bytes:
        """Return the `x-gateway-*` header lines of an answer; cached unless the request was retried."""
        policy, reason = decision.policy, decision.reason
        lines = None if retried_from else self._choice_lines.get((policy, reason))
        if lines is None:
            backend = self.backend
            lines = gateway_lines(
                backend.name, backend.declared.method, policy, reason, backend.simulated, retried_from
            )
            if not retried_from:
                self._choice_lines[policy, reason] = lines
        return lines


_MOST_OVERUSE: Final = 5.0
_WINDOW_S: Final = 10.0
"""Time constant of the arrival rate."""


class Traffic:
    """The load of one model in this gateway process.

    Examples
    --------
    >>> traffic = Traffic()
    >>> for second in range(60):
    ...     traffic.arrive(float(second))
    >>> round(traffic.qps(60.0), 2)
    0.95
    """

    def __init__(self) -> None:
        self._rate = 0.0
        self._at_s = 0.0
        self.in_flight = 0
        self.arrived = 0  # requests so far
        # For each client with requests in flight, by id: their number, and its weight.
        self._of: dict[str, tuple[int, float]] = {}
        self._weights = 0.0  # of all of these

    def begin(self, client: Client) -> None:
        """Count a request as in flight."""
        self.in_flight += 1
        count, weight = self._of.get(client.id, (0, client.weight))
        if not count:
            self._weights += weight
        self._of[client.id] = count + 1, weight

    def end(self, client: Client) -> None:
        """Count a request as ended."""
        self.in_flight -= 1
        count, weight = self._of[client.id]
        if count > 1:
            self._of[client.id] = count - 1, weight
        else:
            del self._of[client.id]
            self._weights = self._weights - weight if self._of else 0.0

    def overuse(self, client: Client) -> float:
        """Return the ratio of a client's requests in flight to its share of all, from 1 to 5."""
        if len(self._of) < 2 or client.id not in self._of:
            return 1.0
        count, weight = self._of[client.id]
        return min(_MOST_OVERUSE, max(1.0, count / (weight / self._weights * self.in_flight)))

    def arrive(self, now_s: float) -> None:
        """Count an arrival."""
        self._rate = self.qps(now_s) + 1.0 / _WINDOW_S
        self._at_s = now_s
        self.arrived += 1

    def qps(self, now_s: float) -> float:
        """Return the exponentially weighted arrivals per second, an unbiased estimate of a Poisson rate."""
        return self._rate * math.exp((self._at_s - now_s) / _WINDOW_S) if self._rate else 0.0


_SHARE: Final = 0.2
"""Retries per request in the long run."""
_PER_S: Final = 1.0
"""Retries per second allowed on top, for a model with little traffic."""
_RESERVE: Final = 10.0
"""Retries that can be saved up beyond the requests in flight."""


class RetryBudget:
    """Bounds how many requests of a model may be retried.

    Each request adds a fifth of a retry, and each second one more, as in Finagle's budgets [1]_. It saves up at most as
    many as there are requests in flight, plus ten: all requests of a replica that dies may be retried.

    References
    ----------
    .. [1] Finagle, `com.twitter.finagle.service.RetryBudget`.

    Examples
    --------
    >>> budget = RetryBudget(Traffic())
    >>> taken = 0
    >>> while budget.has_one(0.0):
    ...     budget.take()
    ...     taken += 1
    >>> taken, budget.has_one(0.5), budget.has_one(1.0)
    (10, False, True)
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._level = math.inf
        self._arrived = 0
        self._at_s = 0.0

    def has_one(self, now_s: float) -> bool:
        """Return whether there is a retry left; `take` takes it."""
        traffic = self._traffic
        earned = _SHARE * (traffic.arrived - self._arrived) + _PER_S * (now_s - self._at_s)
        self._level = min(self._level + earned, _RESERVE + traffic.in_flight)
        self._arrived, self._at_s = traffic.arrived, now_s
        return self._level >= 1.0

    def take(self) -> None:
        """Take a retry."""
        self._level -= 1.0


_PROMPT_TOKEN_S: Final = 2e-5
_OUTPUT_TOKEN_S: Final = 4e-4
_OUTPUT_TOKENS: Final = 256.0
"""Assumed with a policy that predicts nothing: figures of an 8B model on an H100 in a batch of 16."""


@dataclass(slots=True)
class Model:
    """A served model with its pool and policy."""

    name: str
    policy: Policy
    default_temperature: float
    upstreams: dict[str, Upstream]  # its backends by name
    traffic: Traffic = field(default_factory=Traffic)
    fallback: Fallback = field(default_factory=Fallback)  # chooses a backend when the policy fails
    parts: PartTokens = field(default_factory=PartTokens)  # tokens that its engines make of images and the like
    troubles: Troubles = field(default_factory=Troubles)  # failures by kind of request and replica
    # Passes an outcome to the policy; None if the policy does not learn.
    observe: Callable[[Outcome], None] | None = None
    # The policy in each of its roles, or None: looked up once, since that is slow.
    learner: Learner | None = field(init=False)
    explainer: Explainer | None = field(init=False)
    maintained: Maintained | None = field(init=False)
    heir: Heir | None = field(init=False)
    informed: Informed | None = field(init=False)
    guardrail: Guardrail | None = field(init=False)  # its comparison with `least_loaded`
    detector: Detector[Any] | None = field(init=False)  # what it has found of replicas
    retry_budget: RetryBudget = field(init=False)  # bounds how many of its requests are retried
    rescue: bool = True  # whether another backend resumes the stream of one that fails
    ask_usage: bool = True  # whether engines are asked for the usage of streams whose clients do not ask for it

    def __post_init__(self) -> None:
        self.retry_budget = RetryBudget(self.traffic)
        policy = self.policy
        self.learner = policy if isinstance(policy, Learner) else None
        self.explainer = policy if isinstance(policy, Explainer) else None
        self.maintained = policy if isinstance(policy, Maintained) else None
        self.heir = policy if isinstance(policy, Heir) else None
        self.informed = policy if isinstance(policy, Informed) else None
        self.guardrail, self.detector = (
            (None, None) if self.explainer is None else (self.explainer.guardrail, self.explainer.detector)
        )
        if self.learner is not None:
            self.observe = self.learner.observe
            self.troubles = self.learner.troubles or self.troubles

    def take_over(self, before: Model) -> None:
        """Share the retry budget and the current replicas with an earlier model, which its requests in flight keep."""
        self.retry_budget = before.retry_budget
        before.upstreams.clear()
        before.upstreams.update(self.upstreams)
        self.upstreams = before.upstreams

    def describe(
        self,
        headers: RequestHeaders,
        document: dict[str, Any],
        load: tuple[float, int],
        text_features: Collection[str],
        prompt: Prompt | None,
        stored: StoredTokens,
    ) -> RequestFeatures:
        """Return the features of a request; `load` is requests per second, and in flight."""
        return describe(
            headers.endpoint,
            document,
            model=self.name,
            default_temperature=self.default_temperature,
            qps=load[0],
            in_flight=load[1],
            workload=headers.routing_headers.workload,
            text_features=text_features,
            prompt=prompt,
            client=headers.client.source,
            parts=self.parts,
            stored=stored,
        )

    # Hooks of the policy, which may raise anything. The router calls `choose`.

    def price(self, features: RequestFeatures) -> Price:
        """Return the cost that the policy expects for a request on the best backend that is up; else a guess."""
        if self.explainer is not None:
            try:
                backends = [each.backend for each in self.upstreams.values()]
                up = [each for each in backends if each.health.state is State.UP]
                if (price := self.explainer.price(features, up or backends)) is not None:
                    return price
            except Exception as error:  # noqa: BLE001
                self.fallback.note(self.policy.name, "price", error)
        output_tokens = min(features.max_tokens or _OUTPUT_TOKENS, _OUTPUT_TOKENS) * features.n
        prompt_s = _PROMPT_TOKEN_S * features.prompt_tokens
        return Price(prompt_s, _OUTPUT_TOKEN_S, output_tokens, prompt_s)

    def forget(self, backend: str) -> None:
        """Drop what the policy knows about a backend that has left."""
        self.troubles.forget(backend)
        if self.informed is not None:
            self._guarded("forget", self.informed.forget, backend)

    def engine_changed(self, backend: str, change: EngineChange) -> None:
        """Report to the policy that an engine has changed."""
        self.troubles.forget(backend)
        if self.informed is not None:
            self._guarded("engine_changed", self.informed.engine_changed, backend, change)

    def sent_elsewhere(self, backend: str, prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        """Report to the policy that another gateway has sent a prompt."""
        if self.informed is not None:
            self._guarded("sent_elsewhere", self.informed.sent_elsewhere, backend, prefixes, lengths)

    def evicted(self, backend: str, unused_s: float | None, *, is_full: bool) -> None:
        """Report to the policy that an engine has evicted cached blocks."""
        if self.informed is not None:
            self._guarded("evicted", self.informed.evicted, backend, unused_s, is_full)

    def correct(self, backend: str, factor: float) -> None:
        """Pass to the policy the factor that corrects the tokens per step in a backend's answers."""
        if self.informed is not None:
            self._guarded("correct", self.informed.correct, backend, factor)

    def left(self, decision: Decision) -> None:
        """Report to the policy that a request has left its backend without an outcome to learn from."""
        if self.learner is not None:
            self._guarded("left", self.learner.left, decision)

    def observe_shadow(self, outcome: Outcome) -> None:
        """Pass the outcome of shadow drafting on an answer to the policy."""
        if self.learner is not None:
            self._guarded("observe_shadow", self.learner.observe_shadow, outcome)

    def _guarded(self, name: str, hook: Callable[..., None], *arguments: object) -> None:
        try:
            hook(*arguments)
        except Exception as error:  # noqa: BLE001
            self.fallback.note(self.policy.name, name, error)
