"""Health probe of a replica: whether it responds, whether it serves the model, and its load."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx
import orjson

from backends.backend import Backend
from backends.engine_metrics import MOST_PAGE_BYTES, EngineMetrics, MetricsReader
from backends.http.bounded import PLAIN, UnboundedError, fetch, parts_of
from backends.reported import MOST_CONTEXT_TOKENS, finite, whole

_MOST_HEALTH_BYTES: Final = 1 << 16
_MOST_VERSION_BYTES: Final = 1 << 10
_MOST_MODELS_BYTES: Final = 1 << 20
_MOST_CARD_BYTES: Final = 1 << 14
_MOST_NAMES: Final = 5
_MOST_ADAPTERS: Final = 1000
_MOST_NAME_CHARS: Final = 256
_HOTTEST: Final = 100.0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The outcome of one probe.

    Examples
    --------
    >>> ProbeResult("/health answered 503").problem
    '/health answered 503'
    """

    problem: str | None = None  # what is wrong, in words; None if the replica is healthy
    refused: bool = False  # whether nothing listens at the address, which needs no second probe to confirm
    late: bool = False  # whether it did not answer in time
    engine: EngineMetrics | None = None  # the replica's metrics; None if it has no such page
    serves: tuple[str, ...] = ()  # what it serves in place of its model
    # What it reported that cannot be, which was ignored: fields of `EngineMetrics`, or `metrics` for a page that was
    # not read to its end.
    ignored: tuple[str, ...] = ()


class Probe:
    """The HTTP health probe of one replica; of a backend whose model is "", it takes the first that is served."""

    def __init__(self, backend: Backend, timeout_s: float) -> None:
        self.model = backend.model
        self._asks_version = backend.asks_version and backend.said_limit is not None
        headers = PLAIN | ({"authorization": f"Bearer {backend.api_key}"} if backend.api_key else {})
        base, uds = backend.url, None
        if base.startswith("unix:"):
            base, uds = "http://localhost", base.removeprefix("unix:").removeprefix("//")
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=uds, verify=base.startswith("https:"), trust_env=False),
            base_url=base,
            headers=headers,
            timeout=timeout_s,
        )
        # The model's entry in the replica's `/v1/models`, as last read; None before.
        self.model_card: dict[str, object] | None = None
        self.context_tokens = 0  # tokens of the longest context, by that entry; 0 if it does not say
        self.version = ""  # of its vLLM, if that is asked for; empty if it does not say
        self.served: tuple[str, ...] = ()  # names of its models, without adapters, as last read
        self.adapters: frozenset[str] = frozenset()  # names of the LoRA adapters that it has loaded, as last read

    async def run(self, *, admit: bool) -> ProbeResult:
        """Probe the replica."""
        try:
            status = await self._health()
            if status not in {200, 404}:  # 404: not vLLM, but perhaps an OpenAI-compatible server
                return ProbeResult(f"/health answered {status}")
            if admit or status == 404 or self.model_card is None:
                problem = await self._check_model()
                if problem is not None:
                    return ProbeResult(problem, serves=() if self.model in self.served else self.served)
            else:
                with contextlib.suppress(httpx.HTTPError):  # adapters are loaded and unloaded while it runs
                    await self._list_models()
            return await self._metrics()
        except httpx.ConnectError as error:
            return _unconnected(error)
        except httpx.TimeoutException:
            return ProbeResult("does not answer its health check in time", late=True)
        except httpx.HTTPError as error:
            return ProbeResult(f"fails its health check ({type(error).__name__}: {error})")

    def set_timeout(self, timeout_s: float) -> None:
        """Set the seconds until a probe times out."""
        self._client.timeout = httpx.Timeout(timeout_s)

    async def default_temperature(self) -> float | None:
        """Ask the engine for the temperature of a request without one, with a request for one token.

        The Responses API repeats the sampling parameters that a request was given. Nothing is stored at the engine.
        """
        body = {"model": self.model, "input": "Hi", "max_output_tokens": 1, "store": False}
        document = as_json(await self.request("POST", "/v1/responses", body))
        return finite(document.get("temperature"), _HOTTEST) if isinstance(document, dict) else None

    async def request(self, method: str, path: str, body: object = None, most_bytes: int = 1 << 20) -> bytes:
        """Return the answer to a request, if its status is 200; else nothing."""
        try:
            status, answer = await fetch(self._client, path, most_bytes, method=method, body=body)
        except httpx.HTTPError:
            return b""
        return answer if status == httpx.codes.OK else b""

    async def has_response(self, response_id: str) -> bool | None:
        """Return whether the engine holds a stored response; None if it does not tell."""
        try:
            async with self._client.stream("GET", f"/v1/responses/{response_id}") as answer:
                return {200: True, 404: False}.get(answer.status_code)
        except httpx.HTTPError:
            return None

    async def ask_version(self) -> None:
        """Ask for the version of vLLM; without an answer, the one that is known stays."""
        match as_json(await self.request("GET", "/version", most_bytes=_MOST_VERSION_BYTES)):
            case {"version": said}:
                self.version = str(said)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _health(self) -> int:
        """Return the status of `/health`, whose body says nothing."""
        async with self._client.stream("GET", "/health") as answer:
            with contextlib.suppress(UnboundedError):
                async for _ in parts_of(answer, _MOST_HEALTH_BYTES):
                    pass  # read, so that the connection can be used again
            return answer.status_code

    async def _metrics(self) -> ProbeResult:
        async with self._client.stream("GET", "/metrics") as answer:
            if answer.status_code != 200:
                return ProbeResult()
            reader = MetricsReader()
            try:
                async for part in parts_of(answer, MOST_PAGE_BYTES):
                    reader.feed(part)
            except UnboundedError:
                return ProbeResult(ignored=("metrics",))
        engine = reader.metrics()
        return ProbeResult(engine=engine, ignored=() if engine is None else engine.ignored)

    async def _list_models(self) -> tuple[int, dict[str, dict[str, Any]] | None]:
        """Read what the engine serves; return the status, and the entries by name, None if that is no list of models.

        Raises
        ------
        UnboundedError
            If the list is too long.
        """
        status, body = await fetch(self._client, "/v1/models", _MOST_MODELS_BYTES)
        if status != 200:
            return status, None
        try:
            cards: list[dict[str, Any]] = orjson.loads(body)["data"]
            served = {str(card["id"]): card for card in cards}
            adapters = dict.fromkeys(name for name, card in served.items() if card.get("parent"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return status, None
        self.served = tuple(name for name in served if name not in adapters)
        self.adapters = frozenset([name for name in adapters if len(name) <= _MOST_NAME_CHARS][:_MOST_ADAPTERS])
        return status, served

    async def _check_model(self) -> str | None:
        try:
            status, served = await self._list_models()
        except UnboundedError as error:
            return str(error)
        if status in {401, 403}:
            return f"/v1/models answered {status}: set the backend's api_key"
        if status != 200:
            return f"/v1/models answered {status}" + (": is this an engine?" if status == 404 else "")
        self.model = self.model or next(iter(served or ()), "")
        card = (served or {}).get(self.model, {})
        card_bytes = _bytes_of(card)
        if served is None or card_bytes is None:
            return "/v1/models did not answer with a list of models"
        if not served:
            return "serves no model"
        if not card:
            names = ", ".join(name[:80] for name in sorted(served)[:_MOST_NAMES]) or "nothing"
            hint = f", or call the model {names} in the pool file" if len(served) == 1 else ""
            return f"serves {names}, not {self.model}: start it with --served-model-name {self.model}{hint}"
        if card_bytes > _MOST_CARD_BYTES:
            return f"/v1/models says more than {_MOST_CARD_BYTES} bytes of {self.model}"
        self.model_card = card
        self.context_tokens = whole(card.get("max_model_len"), MOST_CONTEXT_TOKENS) or 0
        if self._asks_version:
            await self.ask_version()
        return None


def as_json(text: bytes) -> Any:
    """Return a document; None for what is none."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def misnamed(model: str, serves: Sequence[tuple[str, ...]]) -> str:
    """Return what is wrong with the name of a model that none of its engines serves, where all serve the same; else "".

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
    """Return why there is no connection; also for a name that does not resolve, or a certificate."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, socket.gaierror | ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, socket.gaierror):
        return ProbeResult(f"has an address that does not resolve: {error.request.url.host} ({cause.strerror})")
    if cause is not None:
        return ProbeResult(f"cannot be connected to by TLS ({error})")
    return ProbeResult(f"refuses connections ({error})", refused=True)


def _bytes_of(card: dict[str, Any]) -> int | None:
    """Return the size of an entry of a list of models; None if it is nested too deeply to be written."""
    try:
        return len(orjson.dumps(card))
    except TypeError:
        return None
