"""A replica's health probe: whether it responds, whether it serves the model, and its load."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import httpx
import orjson

from backends.backend import Backend
from backends.engine import Processes, Said
from backends.engine_metrics import MOST_PAGE_BYTES, EngineMetrics, MetricsReader
from backends.http import authorities
from backends.http.bounded import PLAIN, UnboundedError, fetch, parts_of
from backends.http.names import NamedNetwork
from backends.reported import MOST_CONTEXT_TOKENS, finite, printable, whole

_MOST_HEALTH_BYTES: Final = 1 << 16
_MOST_SHORT_BYTES: Final = 1 << 10
_MOST_MODELS_BYTES: Final = 1 << 20
_MOST_CARD_BYTES: Final = 1 << 14
_MOST_NAMES: Final = 5
_MOST_ADAPTERS: Final = 1000
_MOST_NAME_CHARS: Final = 256
_HOTTEST: Final = 100.0
_STEADY_S: Final = 5.0
_LOOKS: Final = 8
"""Connections to see whether several engines share an address; with two in random order, 1 in 128 such looks misses."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The outcome of one probe.

    Examples
    --------
    >>> ProbeResult("/health answered 503").problem
    '/health answered 503'
    """

    problem: str | None = None  # what is wrong, in words; None if the replica is healthy
    refused: bool = False  # whether nothing listens at the address, which is certain
    is_certain: bool = False  # whether no second probe is needed to confirm the problem
    late: bool = False  # whether it did not answer in time
    status: int | None = None  # of its refusal; None without one
    said: Said | None = None  # what its engine reports about itself; None if not heard
    is_new: bool = False  # whether that is a different engine from the known one
    is_proven: bool = False  # whether the engine has answered a request
    engine: EngineMetrics | None = None  # the engine's metrics; None if it has no such page
    serves: tuple[str, ...] = ()  # what it serves instead of its model
    # Impossible values it reported, which were ignored: fields of `EngineMetrics`, or `metrics` for a page that was not
    # read to its end.
    ignored: tuple[str, ...] = ()


class Probe:
    """The HTTP health probe of one replica; if the backend's model is "", it takes the first one served."""

    def __init__(self, backend: Backend, timeout_s: float) -> None:
        self.model = backend.model
        self._backend = backend
        self._asks_version = backend.asks_version and backend.declared_limit is not None
        headers = PLAIN | ({"authorization": f"Bearer {backend.api_key}"} if backend.api_key else {})
        base, uds = backend.url, None
        if base.startswith("unix:"):
            base, uds = "http://localhost", base.removeprefix("unix:").removeprefix("//")
        verify = base.startswith("https:") and authorities.trusted()
        transport = httpx.AsyncHTTPTransport(uds=uds, verify=verify, trust_env=False)
        transport._pool._network_backend = NamedNetwork()  # httpx has no parameter for it
        self._client = httpx.AsyncClient(transport=transport, base_url=base, headers=headers, timeout=timeout_s)
        self.processes = Processes()  # the processes that answer at the address
        self.was_refused = False  # whether a connection failed since an engine last answered
        self._created: tuple[object, float, float] = None, 0.0, 0.0  # model's creation time; when first and last read

    async def run(self, *, admit: bool, prove: bool = False) -> ProbeResult:
        """Probe the replica; with `prove`, its engine must also answer a request."""
        known = self._backend.engine.said
        try:
            status = await self._health()
            if status not in {200, 404}:  # 404: not vLLM, but perhaps an OpenAI-compatible server
                return ProbeResult(f"/health answered {status}", status=status)
            listed = await self._list_models(known, is_needed=admit or status == 404 or known.card is None)
            if listed.said is None:
                return listed
            result = await self._hear(known, listed.said)
            if prove and result.problem is None:
                return await self._prove(result)
        except httpx.ConnectError as error:
            result = _unconnected(error)
            self.was_refused |= result.refused
            if self._backend.url.startswith("https:") and not result.refused:
                await asyncio.wrap_future(authorities.renewals.begin())
        except httpx.TimeoutException:
            return ProbeResult("does not answer its health check in time", late=True)
        except httpx.HTTPError as error:
            return ProbeResult(f"fails its health check ({type(error).__name__}: {error})")
        return result

    def set_timeout(self, timeout_s: float) -> None:
        """Set the seconds until a probe times out."""
        self._client.timeout = httpx.Timeout(timeout_s)

    async def default_temperature(self) -> float | None:
        """Learn the engine's default temperature from a request for one token.

        The Responses API echoes a request's sampling parameters. The engine stores nothing.
        """
        body = {"model": self.model, "input": "Hi", "max_output_tokens": 1, "store": False}
        document = as_json(await self.request("POST", "/v1/responses", body))
        return finite(document.get("temperature"), _HOTTEST) if isinstance(document, dict) else None

    async def request(self, method: str, path: str, body: object = None, most_bytes: int = 1 << 20) -> bytes:
        """Return the answer to a request if its status is 200; else b""."""
        try:
            status, answer = await fetch(self._client, path, most_bytes, method=method, body=body)
        except httpx.HTTPError:
            return b""
        return answer if status == httpx.codes.OK else b""

    async def has_response(self, response_id: str) -> bool | None:
        """Return whether the engine has a response stored; None if it does not tell."""
        try:
            async with self._client.stream("GET", f"/v1/responses/{response_id}") as answer:
                return {200: True, 404: False}.get(answer.status_code)
        except httpx.HTTPError:
            return None

    async def version(self) -> str:
        """Ask for the version of vLLM; empty without an answer."""
        match as_json(await self.request("GET", "/version", most_bytes=_MOST_SHORT_BYTES)):
            case {"version": str(said)}:
                return printable(said)
        return ""

    async def meets_several(self) -> bool:
        """Return whether several engines answer at the address, judged by their metrics over several connections."""
        processes = Processes()
        try:
            pages = [(await self._metrics())[0] for _ in range(_LOOKS)]
        except httpx.HTTPError:
            return False  # its probe reports such failures
        return any(processes.take(page, 0.0)[1] for page in pages if page is not None) or processes.are_several

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _health(self) -> int:
        """Return the status of `/health`; its body says nothing."""
        async with self._client.stream("GET", "/health") as answer:
            with contextlib.suppress(UnboundedError):
                async for _ in parts_of(answer, _MOST_HEALTH_BYTES):
                    pass  # read it, so that the connection can be reused
            return answer.status_code

    async def _list_models(self, known: Said, *, is_needed: bool) -> ProbeResult:
        """Read what the engine serves; an unclear answer leaves `known` unchanged, unless one is needed."""
        try:
            result = self._listed(*await fetch(self._client, "/v1/models", _MOST_MODELS_BYTES))
        except UnboundedError as error:
            result = ProbeResult(str(error))
        except httpx.HTTPError:
            if is_needed:
                raise
            result = ProbeResult()
        return result if is_needed or result.is_certain or result.said is not None else ProbeResult(said=known)

    def _listed(self, status: int, body: bytes) -> ProbeResult:
        """Parse an answer of `/v1/models`."""
        if status in {401, 403}:
            hint = "its api_key is not accepted" if self._backend.api_key else "set the backend's api_key"
            return ProbeResult(f"/v1/models answered {status}: {hint}", is_certain=True, status=status)
        if status != 200:
            hint = ": is this an engine?" if status == 404 else ""
            return ProbeResult(f"/v1/models answered {status}{hint}", status=status)
        try:
            cards: list[dict[str, Any]] = orjson.loads(body)["data"]
            adapters = {printable(str(card["id"])): card for card in cards if card.get("parent")}
            models = {printable(str(card["id"])): card for card in cards if not card.get("parent")}
            served = adapters | models  # on a name clash, the model wins
            self.model = self.model or next(iter(models), "")
            card = served.get(self.model, {})
            card_bytes = len(orjson.dumps(card))  # parsed, so not nested too deeply to serialize
        except (ValueError, KeyError, TypeError, AttributeError):
            return ProbeResult("/v1/models did not answer with a list of models")
        names = tuple(models)
        if not served:
            return ProbeResult("serves no model", is_certain=True)
        if not card:
            some = ", ".join(name[:80] for name in sorted(served)[:_MOST_NAMES])
            hint = f", or call the model {some} in the pool file" if len(served) == 1 else ""
            problem = f"serves {some}, not {self.model}: start it with --served-model-name {self.model}{hint}"
            return ProbeResult(problem, is_certain=True, serves=names)
        if card_bytes > _MOST_CARD_BYTES:
            return ProbeResult(f"/v1/models says more than {_MOST_CARD_BYTES} bytes of {self.model}")
        context_tokens = whole(card.get("max_model_len"), MOST_CONTEXT_TOKENS) or 0
        loaded = [name for name in adapters if len(name) <= _MOST_NAME_CHARS][:_MOST_ADAPTERS]
        return ProbeResult(said=Said(card, context_tokens, names, frozenset(loaded)))

    async def _hear(self, known: Said, listed: Said) -> ProbeResult:
        """Read the metrics; ask a new engine for the rest of what it reports about itself."""
        page, ignored = await self._metrics()
        page, is_other = (None, None) if page is None else self.processes.take(page, time.monotonic())
        is_recreated = self._is_recreated(listed, time.monotonic())
        if is_other is None:  # the metrics do not tell
            is_other = self.was_refused or is_recreated or _lasting(listed) != _lasting(known)
        self.was_refused, is_new = False, is_other or known.card is None
        version = "" if is_new else known.version
        if (is_new or self._asks_version) and not version:
            version = await self.version()
        paused = await self._paused() if is_new or known.tells_pause else None
        said = replace(listed, version=version, tells_pause=paused is not None or (known.tells_pause and not is_new))
        if self.processes.are_several:
            said = replace(said, context_tokens=max(said.context_tokens, known.context_tokens))
        problem = "is paused: POST /resume to it" if paused else None
        if page is not None and page.awake == 0:
            problem = "is asleep: POST /wake_up to it"
        return ProbeResult(problem, is_certain=True, said=said, is_new=is_new, engine=page, ignored=ignored)

    async def _paused(self) -> bool | None:
        """Return whether the engine is paused; None if it does not tell."""
        match as_json(await self.request("GET", "/is_paused", most_bytes=_MOST_SHORT_BYTES)):
            case {"is_paused": bool(paused)}:
                return paused
        return None

    async def _metrics(self) -> tuple[EngineMetrics | None, tuple[str, ...]]:
        """Return the metrics page, None without one, and the names of its impossible values.

        The next request gets a new connection: where several engines share an address, one connection shows only one.
        """
        reader = MetricsReader()
        try:
            async with self._client.stream("GET", "/metrics", headers={"connection": "close"}) as answer:
                if answer.status_code != 200:
                    return None, ()
                async for part in parts_of(answer, MOST_PAGE_BYTES):
                    reader.feed(part)
        except (UnboundedError, httpx.ReadTimeout):  # a slow page is no failed health check
            return None, ("metrics",)
        page = reader.metrics()
        return page, () if page is None else page.ignored

    async def _prove(self, result: ProbeResult) -> ProbeResult:
        """Send the engine a request for one token; an error proves nothing, as an embeddings engine may return one."""
        body = {"model": self.model, "prompt": "Hi", "max_tokens": 1}
        try:
            status, _ = await fetch(self._client, "/v1/completions", _MOST_CARD_BYTES, method="POST", body=body)
        except httpx.TimeoutException:
            return ProbeResult("stands still: it does not answer a request for one token")
        return replace(result, is_proven=status == httpx.codes.OK)

    def _is_recreated(self, said: Said, now_s: float) -> bool:
        """Return whether the model's creation time changed; most engines report the time of the answer instead."""
        created = None if said.card is None else said.card.get("created")
        before, first_s, last_s = self._created
        self._created = created, first_s if created == before else now_s, now_s
        return created != before and last_s - first_s > _STEADY_S


def _lasting(said: Said) -> object:
    """Return what an engine reports about its model that stays constant while it runs."""
    card = {} if said.card is None else said.card
    return said.served, {key: value for key, value in card.items() if key not in {"created", "permission"}}


def as_json(text: bytes) -> Any:
    """Parse JSON; return None if it is invalid."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def misnamed(model: str, serves: Sequence[tuple[str, ...]]) -> str:
    """Return what is wrong with a model's name if all its engines serve the same other names; else "".

    Examples
    --------
    >>> misnamed("llama", [("meta/llama",)] * 3)[:50]
    'none of 3 engines serves llama, all serve meta/lla'
    >>> misnamed("llama", [("meta/llama",), ()])
    ''
    """
    if len(serves) < 2 or not serves[0] or set(serves) != {serves[0]}:
        return ""
    names = ", ".join(name[:80] for name in serves[0][:_MOST_NAMES])
    return (
        f"none of {len(serves)} engines serves {model}, all serve {names}: call the model {serves[0][0][:80]} in the "
        f"pool file, or start them with --served-model-name {model}"
    )


def _unconnected(error: httpx.ConnectError) -> ProbeResult:
    """Return why a connection failed, including unresolved names and TLS errors."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, socket.gaierror | ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, socket.gaierror):
        return ProbeResult(f"has an address that does not resolve: {error.request.url.host} ({cause.strerror})")
    if cause is not None:
        unknown = "CERTIFICATE_VERIFY_FAILED" in str(error)
        hint = ": SSL_CERT_FILE names the file of an authority to trust" if unknown else ""
        return ProbeResult(f"cannot be connected to by TLS ({error}){hint}")
    return ProbeResult(f"refuses connections ({error})", refused=True)
