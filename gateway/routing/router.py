"""From a request to the backends that may serve it, and to the one that will."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from backends.backend import Backend, State
from backends.pool import Pool
from backends.speculation import Method
from gateway.http.errors import GatewayError, endpoint_of
from gateway.routing.keys import Client
from gateway.routing.model import Model
from gateway.routing.sticky import ResponseLocations
from policies.features.prompt import Prompt, read_prompt
from policies.features.request import ANY_REQUEST, TEXT_FEATURES, Endpoint, RequestFeatures, baseline_only, describe
from policies.policy import Decision, Policy

# Members of enums are looked up anew each time; and whatever is not final, compiled too.
_UP: Final = State.UP
_OTHER: Final = Endpoint.OTHER


@dataclass(frozen=True, slots=True)
class RoutingHeaders:
    """What a request's own headers say about where it should go; empty strings for nothing."""

    model: str = ""
    backend: str = ""
    method: str = ""
    workload: str = ""
    explore: str = ""
    slo_ttft_ms: str = ""
    slo_tpot_ms: str = ""

    @classmethod
    def read(cls, headers: Mapping[bytes, bytes]) -> RoutingHeaders:
        """Read what `_WISHES` names."""
        if _ANY_WISH.isdisjoint(headers):
            return _NO_WISH
        return cls(*[headers.get(name, b"").decode("latin-1") for name in _WISHES])

    def applied(self, features: RequestFeatures) -> RequestFeatures:
        """Return the features with what the headers ask of the policy.

        Raises
        ------
        GatewayError
            400 if an SLO is no positive number of milliseconds, or `x-gateway-explore` neither yes nor no.
        """
        if not (self.explore or self.slo_ttft_ms or self.slo_tpot_ms):
            return features
        explore = self.explore.strip().lower() or "yes"
        if explore not in ("yes", "no"):
            raise GatewayError(
                400, f"x-gateway-explore is {self.explore!r}; it takes yes or no.", code="invalid_header"
            )
        return replace(
            features,
            explore=explore == "yes",
            slo_ttft_s=_bound_s("x-slo-ttft-ms", self.slo_ttft_ms),
            slo_tpot_s=_bound_s("x-slo-tpot-ms", self.slo_tpot_ms),
        )


def _bound_s(header: str, value: str) -> float | None:
    if not value:
        return None
    try:
        bound_ms = float(value)
    except ValueError:
        bound_ms = math.nan
    if not 0 < bound_ms < math.inf:
        raise GatewayError(
            400, f"{header} is {value!r}; it takes a positive number of milliseconds.", code="invalid_header"
        )
    return 1e-3 * bound_ms


_WISHES: Final = (
    b"x-gateway-model",
    b"x-gateway-backend",
    b"x-gateway-method",
    b"x-gateway-workload",
    b"x-gateway-explore",
    b"x-slo-ttft-ms",
    b"x-slo-tpot-ms",
)
"""In the order of the fields of `RoutingHeaders`."""

_ANY_WISH: Final = frozenset(_WISHES)
_NO_WISH: Final = RoutingHeaders()


class UndescribedRequest:
    """A request whose features nobody has asked for yet, and the load when it arrived."""

    __slots__ = ("_body", "_endpoint", "_in_flight", "_qps")

    def __init__(self, endpoint: Endpoint, body: bytes, qps: float, in_flight: int) -> None:
        self._endpoint = endpoint
        self._body = body
        self._qps = qps
        self._in_flight = in_flight

    def described(self, model: Model) -> RequestFeatures:
        """Return what `describe` finds without a look at the text."""
        return describe(
            self._endpoint,
            _parse(self._body, required=False),
            model=model.name,
            default_temperature=model.default_temperature,
            qps=self._qps,
            in_flight=self._in_flight,
            text_features=(),
        )


class RoutedRequest:
    """A request that is understood: which model it wants and what it looks like.

    Parameters
    ----------
    home
        The one backend that can answer it, where it refers to a response stored there.
    baseline_only
        As in the features, which may be described later.
    prompt
        Where it was read and is to be kept.
    """

    __slots__ = ("_features", "_undescribed", "baseline_only", "home", "model", "prompt")

    def __init__(
        self,
        model: Model,
        features: RequestFeatures | None,
        home: str | None = None,
        *,
        undescribed_request: UndescribedRequest | None = None,
        baseline_only: tuple[str, ...] = (),
        prompt: Prompt | None = None,
    ) -> None:
        self.model = model
        self.home = home
        self.prompt = prompt
        self.baseline_only = baseline_only if features is None else features.baseline_only
        self._features = features
        self._undescribed = undescribed_request

    @property
    def features(self) -> RequestFeatures:
        """What the request looks like."""
        if self._features is None:
            assert self._undescribed is not None
            self._features = self._undescribed.described(self.model)
            self._undescribed = None
        return self._features


class Router:
    """Finds the model, describes the request, and lets the model's policy choose among those that can serve it.

    Parameters
    ----------
    models
        By every name that clients may ask for, aliases included.
    """

    def __init__(self, models: Mapping[str, Model], pool: Pool) -> None:
        self._models = models
        self._pool = pool
        self.locations = ResponseLocations()
        served = {id(model): model for model in models.values()}
        self._only = next(iter(served.values())) if len(served) == 1 else None

    def route(
        self,
        path: str,
        method: str,
        body: bytes,
        client: Client,
        routing_headers: RoutingHeaders,
        now_s: float,
        *,
        whole: bool = False,
        keep_bytes: int = 0,
    ) -> RoutedRequest:
        """Read a request as far as choosing needs it.

        Parameters
        ----------
        whole
            Work out every feature, not only those that the model's policy decides by.
        keep_bytes
            Keep the prompt of a body that is no longer.

        Raises
        ------
        GatewayError
            400 if the body cannot be read or names no model where it must, 403 if the key may not use the model,
            404 if there is no such model.
        """
        endpoint = endpoint_of(path)
        document = _parse(body, required=endpoint is not _OTHER and method == "POST")
        model = self._find(document.get("model") or routing_headers.model or None, client, path)
        policy, traffic, home = model.policy, model.traffic, self.locations.home_of(path, document)
        if (
            not (whole or policy.reads_requests)
            and routing_headers is _NO_WISH
            and client.slo_ttft_s is client.slo_tpot_s is None
        ):
            later = UndescribedRequest(endpoint, body, traffic.qps(now_s), traffic.in_flight)
            return RoutedRequest(model, None, home, undescribed_request=later, baseline_only=baseline_only(document))
        prompt = read_prompt(document)
        features = describe(
            endpoint,
            document,
            model=model.name,
            default_temperature=model.default_temperature,
            qps=traffic.qps(now_s),
            in_flight=traffic.in_flight,
            workload=routing_headers.workload,
            text_features=TEXT_FEATURES if whole else policy.text_features,
            prompt=prompt,
        )
        features = routing_headers.applied(features)
        if features.slo_ttft_s is None:
            features.slo_ttft_s = client.slo_ttft_s
        if features.slo_tpot_s is None:
            features.slo_tpot_s = client.slo_tpot_s
        return RoutedRequest(model, features, home, prompt=prompt if len(body) <= keep_bytes else None)

    def candidates(
        self, routed: RoutedRequest, client: Client, routing_headers: RoutingHeaders, tried: Collection[str] = ()
    ) -> list[Backend]:
        """Return the backends that are up and can serve the request, less those already tried.

        Raises
        ------
        GatewayError
            400 or 403 if the request's wish cannot be granted, 503 if no backend is left.
        """
        name = routed.model.name
        members = self._pool.of(name)
        if routing_headers.backend or routing_headers.method:
            members = _granted(members, client, routing_headers, name)
        elif routed.home is not None:
            members = [one for one in members if one.name == routed.home] or members
        elif routed.baseline_only:
            # Without a baseline in the pool any engine will do: it answers with an error that says what it lacks.
            members = [one for one in members if one.method is Method.BASELINE] or members
        ready = [one for one in members if one.state is _UP]
        if tried:
            ready = [one for one in ready if one.name not in tried]
        if not ready:
            raise self._none_left(routed, members, tried)
        return ready

    def choose(
        self,
        routed: RoutedRequest,
        candidates: list[Backend],
        routing_headers: RoutingHeaders,
        policy: Policy | None = None,
    ) -> Decision:
        """Let the policy (by default the model's) choose; a wish leaves it the choice among what was wished for.

        Where it fails, the least loaded candidate is chosen.
        """
        model = routed.model
        policy = policy or model.policy
        features = routed.features if policy.reads_requests else ANY_REQUEST
        try:
            decision = policy.choose(features, candidates)
            if decision.backend not in model.upstreams:
                raise LookupError(f"{decision.backend!r} is no backend of {model.name}")  # noqa: TRY301 -- as any other
        except Exception as error:  # noqa: BLE001 -- anybody's code: no defect of it shall turn requests away
            model.fallback.note(policy.name, "choose", error)
            decision = model.fallback.choose(ANY_REQUEST, candidates)
        if routed.home == decision.backend:
            return replace(decision, policy="affinity", reason="stored_response", propensity=1.0)
        if routing_headers.backend or routing_headers.method:
            reason = "backend" if routing_headers.backend else "method"
            return replace(decision, policy="override", reason=reason, propensity=1.0)
        return decision

    def _find(self, wanted: object, client: Client, path: str) -> Model:
        if wanted is None and self._only is not None:
            model: Model | None = self._only
        elif wanted is None:
            raise GatewayError(
                400,
                f'Say which model {path} is for, as "model" in a JSON body or in the header x-gateway-model; '
                f"there are: {self._names()}.",
                code="model_required",
                param="model",
            )
        else:
            model = self._models.get(wanted) if isinstance(wanted, str) else None
        if model is None:
            raise GatewayError(
                404,
                f"The model `{wanted}` does not exist here; there are: {self._names()}.",
                code="model_not_found",
                param="model",
            )
        if client.models is not None and model.name not in client.models:
            raise GatewayError(
                403,
                f"Key {client.name!r} may not use {model.name}; it may use: {', '.join(sorted(client.models))}.",
                code="model_not_allowed",
                param="model",
            )
        return model

    def _names(self) -> str:
        return ", ".join(sorted(self._models))

    def _none_left(self, routed: RoutedRequest, members: Collection[Backend], tried: Collection[str]) -> GatewayError:
        why = "; ".join(
            f"{one.name} failed this request" if one.name in tried else f"{one.name} is {one.state}: {one.state_reason}"
            for one in members
        )
        needs = f" that can serve {' and '.join(routed.baseline_only)}" if routed.baseline_only else ""
        return GatewayError(
            503,
            f"No backend of {routed.model.name}{needs} is up ({why}). Try again shortly.",
            code="no_backend",
            retry_after_s=2.0,
        )


def _granted(
    members: Collection[Backend], client: Client, routing_headers: RoutingHeaders, model: str
) -> list[Backend]:
    if not client.may_override:
        raise GatewayError(
            403,
            f"Key {client.name!r} may not choose backends: leave out x-gateway-backend and x-gateway-method, "
            "or set may_override for it.",
            code="override_not_allowed",
        )
    granted = [
        one
        for one in members
        if routing_headers.backend in {"", one.name} and routing_headers.method in {"", one.method}
    ]
    if not granted:
        there_are = ", ".join(f"{one.name} ({one.method})" for one in members)
        raise GatewayError(
            400,
            f"No backend of {model} is what x-gateway-backend and x-gateway-method ask for; there are: {there_are}.",
            code="backend_not_found",
        )
    return granted


def _parse(body: bytes, *, required: bool) -> dict[str, Any]:
    if not body and not required:
        return {}
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            document = json.loads(body)  # takes NaN and large integers, which vLLM does too
        except (ValueError, RecursionError) as error:
            if not required:
                return {}
            raise GatewayError(
                400, f"The body is not JSON: {error}. Send a JSON object.", code="invalid_json"
            ) from None
    if not isinstance(document, dict):
        if not required:
            return {}
        raise GatewayError(400, "The body is JSON, but not an object: send {...}.", code="invalid_json")
    return document
