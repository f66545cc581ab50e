"""The endpoints that get a trace, and their checks before the first run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Self
from urllib.parse import urlsplit

import httpx
import orjson

from backends.engine_metrics import MOST_PAGE_BYTES, EngineMetrics, read_metrics
from backends.http.address import Address
from backends.http.authorities import trusted
from backends.http.bounded import PLAIN, UnboundedError, fetch
from backends.validation import UsageError
from lab.live.record import error_message
from lab.live.requests import PATHS, EndpointInfo, body_of
from lab.live.texts import TokenScale, every_word

_TIMEOUT_S = 60.0
_MOST_BYTES = 1 << 20  # of an answer


@dataclass(frozen=True, slots=True)
class LiveEndpoint:
    """An endpoint, and what all its requests share.

    Examples
    --------
    >>> endpoint = LiveEndpoint.of("mine=http://localhost:8000/team/v1", None, None)
    >>> endpoint.name, endpoint.prefix
    ('mine', '/team')
    """

    name: str  # unique name in tables
    url: str
    address: Address
    prefix: str = ""  # of its paths, before `/v1`; usually empty
    headers: Sequence[tuple[str, str]] = ()  # headers of every request: the API key
    # Model to request; None: the request's own model if the endpoint lists it, else the first one listed.
    model: str | None = None

    @classmethod
    def of(cls, given: str, model: str | None, api_key: str | None) -> Self:
        """Return the endpoint of `[NAME=]URL`, with or without a final `/v1`; the default name is the address."""
        is_named = "=" in given.partition("://")[0] or given.partition("=")[2].startswith("unix:")
        name, url = given.split("=", 1) if is_named else ("", given)
        try:
            address, parts = Address.parse(url), urlsplit(url)
        except ValueError:
            expected = "expected http://host:port, https://host:port or unix:/path/to.sock"
            raise UsageError(f"--live {given}: {expected}") from None
        if parts.query or parts.fragment or parts.username is not None:
            expected = "expected an address without query and user; give keys with --api-key"
            raise UsageError(f"--live {given}: {expected}")
        prefix = "" if address.path else parts.path.rstrip("/").removesuffix("/v1")
        headers = [("authorization", f"Bearer {api_key}")] if api_key else []
        return cls(name or address.path or address.authority.decode(), url, address, prefix, headers, model)

    def client(self) -> httpx.AsyncClient:
        """Return a client for requests outside the run."""
        scheme = "https" if self.address.tls else "http"
        return httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                uds=self.address.path, verify=self.address.tls and trusted(), trust_env=False
            ),
            base_url=f"{scheme}://{self.address.authority.decode()}{self.prefix}",
            headers=[*self.headers, *PLAIN.items()],
            timeout=_TIMEOUT_S,
        )

    def error(self, problem: str) -> UsageError:
        """Return an error that names the endpoint."""
        return UsageError(f"{self.url}: {problem}")


def endpoints_of(given: Sequence[str], model: str | None, api_key: str | None) -> list[LiveEndpoint]:
    """Return the endpoints of `--live`, whose names must differ."""
    endpoints = [LiveEndpoint.of(one, model, api_key) for one in given]
    names = [one.name for one in endpoints]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--live: {name} is given twice; name them: --live first=URL --live second=URL")
    return endpoints


async def inspect_endpoint(endpoint: LiveEndpoint, apis: Collection[str], seed: int) -> EndpointInfo:
    """List the models, and check each API with two short requests."""
    words = every_word(Random(f"{seed}/probe"))
    try:
        async with endpoint.client() as client:
            models = await _models(endpoint, client)
            model = endpoint.model or next(iter(models), None)
            if model is None:
                raise endpoint.error("lists no model; give --model")
            if model not in models:
                raise endpoint.error(f"has no model '{model}'; it has {', '.join(models) or 'none'}")
            scales = {}
            for api in sorted(apis):
                small = await _probe(endpoint, client, api, model, words[:1])
                scales[api] = TokenScale.through(
                    (1, small), (len(words), await _probe(endpoint, client, api, model, words))
                )
    except UnboundedError as error:
        raise endpoint.error(str(error)) from None
    except httpx.HTTPError as error:
        raise endpoint.error(f"cannot be reached: {type(error).__name__} {error}".rstrip()) from None
    return EndpointInfo(() if endpoint.model is not None else tuple(models), model, scales)


async def engine_counters(endpoint: LiveEndpoint) -> EngineMetrics | None:
    """Return the engine's counters; None without any."""
    try:
        async with endpoint.client() as client:
            status, page = await fetch(client, "/metrics", MOST_PAGE_BYTES)
    except httpx.HTTPError:
        return None
    return read_metrics(page) if status == 200 else None


async def _models(endpoint: LiveEndpoint, client: httpx.AsyncClient) -> list[str]:
    status, answer = await fetch(client, "/v1/models", _MOST_BYTES)
    if status == 404 and endpoint.model is not None:
        return [endpoint.model]
    if status in {401, 403}:
        raise endpoint.error(f"/v1/models answered {status}; give the key with --api-key")
    try:
        return [card["id"] for card in orjson.loads(answer)["data"] if isinstance(card["id"], str)]
    except (ValueError, KeyError, TypeError):
        raise endpoint.error(
            f"/v1/models answered {status} without a list of models; is this an OpenAI-compatible API?"
        ) from None


async def _probe(endpoint: LiveEndpoint, client: httpx.AsyncClient, api: str, model: str, words: Sequence[str]) -> int:
    """Send a prompt of these words; return the engine's token count, 0 if it does not say."""
    body = orjson.loads(body_of(api, model, " ".join(words), 1)) | {"stream": False}
    del body["stream_options"]
    status, answer = await fetch(client, PATHS[api], _MOST_BYTES, method="POST", body=body)
    if status != 200:
        text = " ".join(error_message(answer).split())[:300]
        raise endpoint.error(f"a first request was answered {status}: {text}")
    try:
        usage = orjson.loads(answer).get("usage")
    except (ValueError, AttributeError):
        raise endpoint.error("a first request was answered 200 with no JSON object") from None
    count = usage.get("prompt_tokens") if isinstance(usage, Mapping) else None
    return count if isinstance(count, int) else 0
