"""The router: finds the model of a request, its candidate backends, and the one to send it to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Protocol
from zlib import crc32

import orjson

from backends.backend import Backend
from backends.health import State
from backends.pool import Pool
from backends.recovery import TRIAL
from backends.speculation import Method
from gateway.dialects.asked_usage import options_to_ask
from gateway.dialects.errors import GatewayError
from gateway.dialects.form import text_in_form
from gateway.dialects.json_body import BYTE_ORDER_MARK, decoded_body
from gateway.routing.access import NO_ROUTING_HEADERS, RequestHeaders, RoutingHeaders
from gateway.routing.contexts import fitting, nearest
from gateway.routing.keys import UNAUTHENTICATED, Client
from gateway.routing.large_bodies import check_cost
from gateway.routing.model import Model
from gateway.routing.routed_request import RoutedRequest
from gateway.routing.sticky import ResponseLocations, response_of
from policies.drafter_limits import sparing, surviving
from policies.features.constraints import FATAL, baseline_only
from policies.features.prompt import read_other, read_prompt, template_of_adapter
from policies.features.request import ANY_REQUEST, TEXT_FEATURES, Endpoint, RequestFeatures
from policies.policy import Choose, Decision, Policy

# Final globals save the lookup of enum members on each use, and when compiled, of the global.
_UP: Final = State.UP
_OTHER: Final = Endpoint.OTHER
_CHAT: Final = Endpoint.CHAT
_COMPLETIONS: Final = Endpoint.COMPLETIONS
_RESPONSES: Final = Endpoint.RESPONSES
_EMBEDDINGS: Final = Endpoint.EMBEDDINGS
_LEAST_TOLD: Final = 256  # prompts from this many tokens on are reported to other gateways
SMALL_BYTES: Final = 2**15
"""A body up to this size is parsed immediately, and kept parsed until its features are needed."""
_GZIP: Final = b"\x1f\x8b"
_SHOWN_CHARS: Final = 100
"""Most characters of a client's model name to quote in an error."""
_WITHOUT_BODY: Final = frozenset({"GET", "HEAD", "OPTIONS"})  # a body of theirs has no meaning: RFC 9110, section 9.3

Sent = deque[tuple[Backend, RequestFeatures]]
"""Sent prompts with their backends."""


class Narrowing(Protocol):
    """Controls a comparison: which replicas may get a request, who chooses, and how deep to draft."""

    def choose(self, policy: Policy, features: RequestFeatures, candidates: Sequence[Backend]) -> Decision:
        """Return the decision of the model's policy, or of another in its place, among some of the candidates."""

    def depth(self, backend: str) -> int | None:
        """Return the most tokens that a replica may draft per step; None to leave that to its engine."""


Slo = tuple[float | None, float | None]
"""Seconds to the first token, and per output token; None for no bound."""
NO_SLO: Final[Slo] = (None, None)


class Router:
    """Finds the model and the features of a request, and has the model's policy choose a backend."""

    def __init__(
        self,
        models: dict[str, Model],
        pool: Pool,
        most_values: int,
        locations: ResponseLocations | None = None,
        sent: Sent | None = None,
        slo_classes: Mapping[str, Slo] = MappingProxyType({}),
    ) -> None:
        self._models = models  # models by each name that clients may use, including aliases
        self._pool = pool
        self._recovery = pool.recovery
        self._narrowing: dict[str, Narrowing] = {}  # by model
        self._keep_prompt_bytes = 0  # size of the largest body whose prompt is kept until its exchange has ended
        self._most_values = most_values  # most that the values of a body may add up to, by `large_bodies`
        self._slo_classes = slo_classes  # latency objectives that a request may name
        self.locations = locations or ResponseLocations()  # backends that hold stored responses, and their tokens
        self._tokens_of = self.locations.tokens_of
        self.sent = sent  # prompts to report to other gateways; None without peers
        served = {id(model): model for model in models.values()}
        self._only = next(iter(served.values())) if len(served) == 1 else None

    def keep_prompts(self, most_bytes: int) -> None:
        """Keep the prompts of bodies up to a size until their exchanges have ended."""
        self._keep_prompt_bytes = most_bytes

    def depth(self, model: str, backend: str) -> int | None:
        """Return the most tokens that a replica may draft per step for a request; None if its engine decides."""
        narrowing = self._narrowing.get(model)
        return None if narrowing is None else narrowing.depth(backend)

    def narrow_by(self, narrowing: dict[str, Narrowing]) -> None:
        """Set what narrows the candidates of each model's requests before its policy chooses."""
        self._narrowing = narrowing

    def is_compared(self, routed: RoutedRequest) -> bool:
        """Return whether a comparison narrows the candidates of a request, unless it says where it must go."""
        if routed.model.name not in self._narrowing:
            return False
        return routed.home is None and not (routed.headers.backend or routed.headers.method)

    def check(self, body: bytes) -> Iterator[None]:
        """Check in steps that a large body is cheap enough for `route` to parse."""
        if _may_be_object(body):  # anything else is not parsed
            yield from check_cost(body, self._most_values)

    def unplaced(self, headers: RequestHeaders) -> str:
        """Return the id of the stored response that a request reads, if nothing tells its model here; else nothing."""
        if self._only is not None or headers.endpoint is not _OTHER or headers.routing_headers.model:
            return ""
        response_id = response_of(headers.path, {})
        home = self.locations.home_of(response_id)
        return "" if home is not None and headers.client.may_use(home.model) else response_id

    def route(self, headers: RequestHeaders, body: bytes, now_s: float, *, whole: bool = False) -> RoutedRequest:
        """Return a request with its model and the features that the choice needs, or with all features (`whole`)."""
        path, client, endpoint, wanted = headers.path, headers.client, headers.endpoint, headers.routing_headers
        document = {} if headers.method in _WITHOUT_BODY else _parse(body, required=endpoint is not _OTHER)
        name = document.get("model") or None
        if name is None:
            name = (headers.form and text_in_form(headers.form, body, "model")) or wanted.model or None
        response_id, home = "", None
        if endpoint is _RESPONSES or (endpoint is _OTHER and path.startswith("/v1/responses/")):
            response_id = response_of(path, document)
            home = self.locations.home_of(response_id)
            name = name or (home.model if home is not None and client.may_use(home.model) else None)
        model, adapter = self.find(name, client, path)
        policy, traffic, usage_options = model.policy, model.traffic, None
        has_choices, items = False, 0
        if endpoint is _EMBEDDINGS:
            items = _texts(document.get("input"))
        elif endpoint is _CHAT or endpoint is _COMPLETIONS:
            has_choices = document.get("n", 1) != 1 or _texts(document.get("prompt")) > 1
            if model.ask_usage and document.get("stream") is True:
                usage_options = options_to_ask(document)
        has_wishes = wanted is not NO_ROUTING_HEADERS or client.slo_ttft_s is not None or client.slo_tpot_s is not None
        is_narrowed = model.name in self._narrowing
        is_later = not (whole or policy.reads_requests or has_wishes or is_narrowed) and len(body) <= SMALL_BYTES
        prompt = None if is_later else read_prompt(document)
        if endpoint is _OTHER:
            prompt = read_other(document, len(body))
        text_features: Collection[str] = () if is_later else policy.text_features
        load = traffic.qps(now_s), traffic.in_flight
        if whole or is_narrowed:
            text_features = TEXT_FEATURES
        described: RequestFeatures | Callable[[], RequestFeatures]
        if is_later:
            described = partial(model.describe, headers, document, load, text_features, prompt, self._tokens_of)
        else:
            described = features = model.describe(headers, document, load, text_features, prompt, self._tokens_of)
            if wanted.session and "prefix" in text_features and not features.prefix:
                features.set_session(hash((crc32(client.id.encode()), crc32(wanted.session.encode()))))
            if adapter:  # adapters are separate applications, whose prompts are cached separately
                apart = crc32(adapter.encode())
                prefix = tuple([hash((apart, each)) for each in features.prefix])
                features.set_apart(template_of_adapter(adapter, features.template), prefix)
            ttft_s, tpot_s = client.slo_ttft_s, client.slo_tpot_s
            if wanted.slo_class:
                ttft_s, tpot_s = self._class(wanted.slo_class)
            ttft_s = ttft_s if wanted.slo_ttft_s is None else wanted.slo_ttft_s
            tpot_s = tpot_s if wanted.slo_tpot_s is None else wanted.slo_tpot_s
            features.demand(traffic.overuse(client), ttft_s, tpot_s)
        return RoutedRequest(
            model,
            described,
            response_id,
            home.backend if home is not None and home.model == model.name else None,
            client=client,
            headers=wanted,
            document=document,
            baseline_only=baseline_only(document) if is_later else (),
            prompt=prompt if len(body) <= self._keep_prompt_bytes else None,
            usage_options=usage_options,
            adapter=adapter,
            has_choices=has_choices,
            items=items,
        )

    def _class(self, name: str) -> Slo:
        """Return the objective of a class of requests."""
        if (found := self._slo_classes.get(name)) is None:
            known = ", ".join(self._slo_classes) or "nothing, as the gateway has no slo_classes"
            message = f"x-slo-class is {name[:_SHOWN_CHARS]!r}; expected {known}."
            raise GatewayError(400, message, code="invalid_header")
        return found

    def candidates(self, routed: RoutedRequest, tried: Collection[str] = (), *, may_try: bool = False) -> list[Backend]:
        """Return the backends that are up and can serve the request, without those already tried."""
        members = self.members(routed)
        ready = [backend for backend in members if backend.health.state is _UP]
        if tried:
            ready = [backend for backend in ready if backend.name not in tried]
        if self._recovery.replicas:
            ready = self._recovery.candidates(members, tried, may_try=may_try)
        if not ready:
            raise self._none_left(routed, members, tried)
        model = routed.model
        if not model.policy.prices_limits:
            for backend in ready:
                if backend.drafter_limit is not None:
                    ready = [*sparing(routed.features, ready)]
                    break
            if model.troubles.found:
                ready = [*model.troubles.sparing(routed.features, ready)]
        return ready

    def members(self, routed: RoutedRequest) -> Sequence[Backend]:
        """Return the backends that can serve the request, whatever their state."""
        name, headers = routed.model.name, routed.headers
        members = self._pool.of(name)
        if routed.adapter:
            members = [backend for backend in members if routed.adapter in backend.engine.said.adapters]
        is_bound = headers.backend or headers.method
        if is_bound:
            members = _requested(members, routed.client, headers, name)
        elif routed.home is not None:
            return [backend for backend in members if backend.name == routed.home] or members
        if routed.baseline_only:
            # Without a baseline, an engine that survives them will do: its error says what it does not support.
            baselines = [backend for backend in members if backend.method is Method.BASELINE]
            if not baselines and (fatal := next((each for each in FATAL if each in routed.baseline_only), "")):
                message = f"{fatal} needs a replica that does not speculate, and none may get this request."
                raise GatewayError(400, message, code="unsupported_parameter", param=fatal)
            members = baselines or members
        if is_bound:
            return members
        if name in self._pool.unlike.contexts:
            kept = fitting(routed.features, members)
            members = kept if any(each.health.state is _UP for each in kept) else members
        for backend in members:
            if backend.drafter_limit is not None:
                kept = surviving(routed.features, members)
                # A request that may be too long for a drafter goes there only if no other backend is up.
                is_away = routed.features.is_unknown and not any(each.health.state is _UP for each in kept)
                return members if is_away else kept
        return members

    def choose(self, routed: RoutedRequest, candidates: list[Backend], choose: Choose | None = None) -> Decision:
        """Return the decision of `choose`, by default the policy's.

        If that fails, choose the least loaded candidate.
        """
        model = routed.model
        policy = model.policy
        features = routed.features if policy.reads_requests else ANY_REQUEST
        for backend in candidates:
            if backend.context_range is not None:
                candidates = [*nearest(routed.features, candidates)]
                break
        try:
            if choose is None and self.is_compared(routed):
                decision = self._narrowing[model.name].choose(policy, routed.features, candidates)
            else:
                decision = (choose or policy.choose)(features, candidates)
            if decision.backend not in model.upstreams:
                raise LookupError(f"{decision.backend!r} is not a backend of {model.name}")  # noqa: TRY301
            if self.sent is not None and choose is None and features.prompt_tokens >= _LEAST_TOLD and features.prefix:
                self.sent.append((model.upstreams[decision.backend].backend, features))
        except Exception as error:  # noqa: BLE001 -- a defect in third-party code must not fail requests
            model.fallback.note(policy.name, "choose", error)
            decision = model.fallback.choose(ANY_REQUEST, candidates)
        if self._recovery.replicas and self._recovery.is_on_trial(model.upstreams[decision.backend].backend):
            return replace(decision, policy="override", reason=TRIAL, propensity=1.0)
        if routed.home == decision.backend:
            return replace(decision, policy="affinity", reason="stored_response", propensity=1.0)
        if routed.headers.backend or routed.headers.method:
            reason = "backend" if routed.headers.backend else "method"
            return replace(decision, policy="override", reason=reason, propensity=1.0)
        return decision

    def find(self, name: object, client: Client, path: str) -> tuple[Model, str]:
        """Return the model that a request names, and its adapter if the name is an adapter's."""
        if client is UNAUTHENTICATED:
            return next(iter(self._models.values())), ""  # engines of any model answer OPTIONS alike
        if name is None and self._only is not None:
            model: Model | None = self._only
        elif not isinstance(name, str):
            raise GatewayError(
                400,
                f'{path} needs a model: send its name as "model" in JSON or a form, or in the header x-gateway-model; '
                f"{self._names(client)}.",
                code="model_required",
                param="model",
            )
        else:
            model = self._models.get(name)
            if model is None:
                for backend in self._pool:
                    if name in backend.engine.said.adapters and client.may_adapt(backend.model, name):
                        return self._models[backend.model], name
        # The same error for both, so as not to reveal what exists.
        if model is None or (client.models is not None and not client.may_use(model.name)):
            named = f"The model `{name[:_SHOWN_CHARS]}`" if isinstance(name, str) else "This model"
            raise GatewayError(
                404,
                f"{named} does not exist here{'' if client.models is None else ' for this key'}; "
                f"{self._names(client)}.",
                code="model_not_found",
                param="model",
            )
        return model, ""

    def _names(self, client: Client) -> str:
        names = [name for name, model in self._models.items() if client.may_use(model.name)]
        return f"there are: {', '.join(sorted(names))}" if names else "/v1/models lists what this key may use"

    def _none_left(self, routed: RoutedRequest, members: Collection[Backend], tried: Collection[str]) -> GatewayError:
        if routed.client is UNAUTHENTICATED:
            return GatewayError(503, "No backend is up. Try again shortly.", code="no_backend", retry_after_s=2.0)
        reasons = "; ".join(
            f"{backend.name} failed this request"
            if backend.name in tried
            else f"{backend.name} is {backend.health.state}: {backend.health.reason}"
            for backend in members
        )
        needs = f" that can serve {' and '.join(routed.baseline_only)}" if routed.baseline_only else ""
        return GatewayError(
            503,
            f"No backend of {routed.model.name}{needs} is up ({reasons}). Try again shortly.",
            code="no_backend",
            retry_after_s=2.0,
        )


def _requested(
    members: Collection[Backend], client: Client, routing_headers: RoutingHeaders, model: str
) -> list[Backend]:
    if not client.may_override:
        raise GatewayError(
            403,
            f"Key {client.name!r} may not choose backends: leave out x-gateway-backend and x-gateway-method, "
            "or set may_override for it.",
            code="override_not_allowed",
        )
    requested = [
        backend
        for backend in members
        if routing_headers.backend in {"", backend.name} and routing_headers.method in {"", backend.declared.method}
    ]
    if not requested:
        known = ", ".join(f"{backend.name} ({backend.declared.method})" for backend in members)
        raise GatewayError(
            400,
            f"No backend of {model} matches x-gateway-backend and x-gateway-method; there are: {known}.",
            code="backend_not_found",
        )
    return requested


def _texts(given: object) -> int:
    """Return the number of texts in an input or a prompt; each may also be a list of token ids."""
    return len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 1


def _may_be_object(body: bytes) -> bool:
    return body.removeprefix(BYTE_ORDER_MARK).lstrip(b" \t\r\n").startswith(b"{")


def _parse(body: bytes, *, required: bool) -> dict[str, Any]:
    """Return the JSON object in a body; an empty one if the body has none and need not."""
    problem = ""
    if body.startswith(b"{") or _may_be_object(body):
        try:
            document: dict[str, Any] = decoded_body(body)
        except orjson.JSONDecodeError as error:
            problem = f"JSON: {error}"
        else:
            return document
    if required:
        problem = problem or ("a JSON object, but compressed" if body.startswith(_GZIP) else "a JSON object")
        raise GatewayError(400, f"The body is not {problem}. Send a JSON object in UTF-8.", code="invalid_json")
    return {}
