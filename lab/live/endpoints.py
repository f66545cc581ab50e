"""The endpoints that a trace is sent to, and a first look at each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from backends.validation import UsageError
from lab.bench.preflight import Look
from lab.bench.prompts import TokenScale
from lab.bench.settings import named_url
from lab.bench.targets import Base, Target
from lab.options.policy import named_policies
from policies.load_balancing import Static


@dataclass(frozen=True, slots=True)
class LiveEndpoint:
    """One row of the table: where requests go, and what each of them asks of the gateway there.

    Parameters
    ----------
    headers
        Sent with every request, the key among them.
    asks
        Whether they ask for a backend or a method.
    model
        What to ask for; None asks for a request's own model, or else for the first that it lists.
    """

    name: str
    url: str
    base: Base
    headers: list[tuple[str, str]]
    asks: bool
    model: str | None


@dataclass(frozen=True, slots=True)
class Seen:
    """What a first look told of an endpoint.

    Parameters
    ----------
    models
        That requests may ask for by their own name.
    model
        That the others ask for.
    scales
        By API.
    """

    models: tuple[str, ...]
    model: str
    scales: Mapping[str, TokenScale]


def live_endpoints(
    urls: Sequence[str], policies: Sequence[str], model: str | None, api_key: str | None
) -> list[LiveEndpoint]:
    """Return the rows of the table: each address with each policy, in their order.

    Raises
    ------
    UsageError
        If an address is none, or a policy cannot be asked for.
    UsageError
        If there is no such policy.
    """
    asked = _asked(policies)
    rows: list[LiveEndpoint] = []
    for given in urls:
        name, url = named_url(given, 0, 1)
        try:
            base = Base.parse(url)
        except ValueError as error:
            raise UsageError(f"--live {given}: {error}") from None
        if name == "endpoint":  # what it is called that has no name
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
    """Return by which headers each policy is asked for; without any, the endpoint is left to its own."""
    asked: dict[str, list[tuple[str, str]]] = {}
    for policy in (named_policies(policies) if policies else {}).values():
        if not isinstance(policy, Static):
            raise UsageError(
                f"--policy {policy.name}: a running gateway routes by its own policy; a request can only ask for a "
                "backend or a method: '{name: static, backend: NAME}'. To compare others, run a gateway with each, and "
                "give --live NAME=URL for each"
            )
        wanted = policy.settings
        header = "x-gateway-method" if wanted.backend is None else "x-gateway-backend"
        value = str(wanted.method) if wanted.backend is None else wanted.backend
        asked[f"{policy.name} {value}"] = [(header, value)]
    return asked or {"": []}


async def look(endpoint: LiveEndpoint, apis: Collection[str], seed: int) -> Seen:
    """Find the models, and send two short requests to each API to see that they are answered.

    Raises
    ------
    UsageError
        If it cannot be reached, does not have the model, or does not answer as it should.
    UsageError
        If it is asked for a backend and is no gateway that heeds it.
    """
    looking = Look(Target(endpoint.name, endpoint.model, url=endpoint.url), endpoint.base, endpoint.headers)
    try:
        seen = {api: await looking.see(api, seed) for api in sorted(apis)}
        first = next(iter(seen.values()))
        models = () if endpoint.model is not None else tuple(await looking.models())
    finally:
        await looking.close()
    if endpoint.asks and not looking.backend:
        raise UsageError(
            f"{endpoint.url}: heeds no --policy: its answers do not say which backend gave them, so it is no gateway"
        )
    return Seen(models, first.model, {api: sight.scale for api, sight in seen.items()})
