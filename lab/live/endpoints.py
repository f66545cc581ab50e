"""The endpoints that a trace is sent to, and their preflight."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from backends.validation import UsageError
from lab.bench.preflight import Preflight
from lab.bench.prompts import TokenScale
from lab.bench.settings import named_url
from lab.bench.targets import BaseUrl, Target
from lab.options.policy import named_policies
from policies.balancing.static import Static


@dataclass(frozen=True, slots=True)
class LiveEndpoint:
    """One row of the table: an endpoint, and the headers of its requests."""

    name: str
    url: str
    base: BaseUrl
    headers: list[tuple[str, str]]  # headers of every request, including the API key
    asks: bool  # whether the headers ask for a backend or a method
    # Model to request; None for the request's own model if the endpoint lists it, else the first listed.
    model: str | None


@dataclass(frozen=True, slots=True)
class EndpointInfo:
    """What the preflight found out about an endpoint."""

    models: tuple[str, ...]  # models that requests may ask for by their own name
    model: str  # model of all other requests
    scales: Mapping[str, TokenScale]  # token scale by API


def live_endpoints(
    urls: Sequence[str], policies: Sequence[str], model: str | None, api_key: str | None
) -> list[LiveEndpoint]:
    """Return the rows of the table: each URL with each policy, in order."""
    asked = _asked(policies)
    rows: list[LiveEndpoint] = []
    for given in urls:
        name, url = named_url(given, 0, 1)
        try:
            base = BaseUrl.parse(url)
        except ValueError as error:
            raise UsageError(f"--live {given}: {error}") from None
        if name == "endpoint":  # the default name
            name = base.address.path or base.address.authority.decode()
        for policy, headers in asked.items():
            title = policy if policy and len(urls) == 1 else f"{name} {policy}".rstrip()
            if any(row.name == title for row in rows):
                raise UsageError(
                    f"--live {given}: {title} is given twice; name them: --live first=URL --live second=URL"
                )
            key = [("authorization", f"Bearer {api_key}")] if api_key else []
            rows.append(LiveEndpoint(title, url, base, [*headers, *key], bool(headers), model))
    return rows


def _asked(policies: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """Return the headers that request each policy; without a policy, a single row without headers."""
    asked: dict[str, list[tuple[str, str]]] = {}
    for policy in (named_policies(policies) if policies else {}).values():
        if not isinstance(policy, Static):
            raise UsageError(
                f"--policy {policy.name}: a running gateway routes by its own policy; a request can only ask for a "
                "backend or a method: '{name: static, backend: NAME}'. To compare other policies, run a gateway with "
                "each, and give --live NAME=URL for each"
            )
        static = policy.settings
        header = "x-gateway-method" if static.backend is None else "x-gateway-backend"
        value = str(static.method) if static.backend is None else static.backend
        asked[f"{policy.name} {value}"] = [(header, value)]
    return asked or {"": []}


async def inspect_endpoint(endpoint: LiveEndpoint, apis: Collection[str], seed: int) -> EndpointInfo:
    """Look up the models, and send two short requests to each API to check that they are answered."""
    preflight = Preflight(Target(endpoint.name, endpoint.model, url=endpoint.url), endpoint.base, endpoint.headers)
    try:
        by_api = {api: await preflight.inspect(api, seed) for api in sorted(apis)}
        first = next(iter(by_api.values()))
        models = () if endpoint.model is not None else tuple(await preflight.models())
    finally:
        await preflight.close()
    if endpoint.asks and not preflight.backend:
        raise UsageError(f"{endpoint.url}: ignores --policy: its answers do not name a backend, so it is not a gateway")
    return EndpointInfo(models, first.model, {api: info.scale for api, info in by_api.items()})
