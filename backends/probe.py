"""Health probe of a replica: whether it responds, whether it serves the model, and its load."""

from __future__ import annotations

import contextlib
import socket
import ssl
from dataclasses import dataclass
from typing import Any, Final

import httpx
import orjson

from backends.backend import Backend
from backends.engine_metrics import MOST_PAGE_BYTES, EngineMetrics, MetricsReader
from backends.http.bounded import PLAIN, UnboundedError, get, parts_of
from backends.reported import MOST_CONTEXT_TOKENS, finite, whole

_MOST_HEALTH_BYTES: Final = 1 << 16
_MOST_VERSION_BYTES: Final = 1 << 10
_MOST_MODELS_BYTES: Final = 1 << 20
_MOST_ANSWER_BYTES: Final = 1 << 20
_MOST_CARD_BYTES: Final = 1 << 14
_MOST_NAMES: Final = 5
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
    # What it reported that cannot be, which was ignored: fields of `EngineMetrics`, or `metrics` for a page that was
    # not read to its end.
    ignored: tuple[str, ...] = ()


class Probe:
    """The HTTP health probe of one replica."""

    def __init__(self, backend: Backend, timeout_s: float) -> None:
        self._model = backend.model
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

    async def run(self, *, admit: bool) -> ProbeResult:
        """Probe the replica."""
        try:
            status = await self._health()
            if status not in {200, 404}:  # 404: not vLLM, but perhaps an OpenAI-compatible server
                return ProbeResult(f"/health answered {status}")
            if admit or status == 404 or self.model_card is None:
                problem = await self._check_model()
                if problem is not None:
                    return ProbeResult(problem)
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
        body = {"model": self._model, "input": "Hi", "max_output_tokens": 1, "store": False}
        try:
            async with self._client.stream("POST", "/v1/responses", json=body) as answer:
                text = b"".join([part async for part in parts_of(answer, _MOST_ANSWER_BYTES)])
            document = orjson.loads(text) if answer.status_code == httpx.codes.OK else None
        except (httpx.HTTPError, orjson.JSONDecodeError):
            return None
        return finite(document.get("temperature"), _HOTTEST) if isinstance(document, dict) else None

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

    async def _check_model(self) -> str | None:
        try:
            status, body = await get(self._client, "/v1/models", _MOST_MODELS_BYTES)
        except UnboundedError as error:
            return str(error)
        if status in {401, 403}:
            return f"/v1/models answered {status}: set the backend's api_key"
        if status != 200:
            return f"/v1/models answered {status}"
        try:
            cards: list[dict[str, Any]] = orjson.loads(body)["data"]
            served = {str(card["id"]): card for card in cards}
            card = served.get(self._model, {})
            is_short = len(orjson.dumps(card)) <= _MOST_CARD_BYTES
        except (ValueError, KeyError, TypeError):
            return "/v1/models did not answer with a list of models"
        if not card:
            names = ", ".join(name[:80] for name in sorted(served)[:_MOST_NAMES]) or "nothing"
            hint = f", or call the model {names} in the pool file" if len(served) == 1 else ""
            return f"serves {names}, not {self._model}: start it with --served-model-name {self._model}{hint}"
        if not is_short:
            return f"/v1/models says more than {_MOST_CARD_BYTES} bytes of {self._model}"
        self.model_card = card
        self.context_tokens = whole(card.get("max_model_len"), MOST_CONTEXT_TOKENS) or 0
        if self._asks_version:
            with contextlib.suppress(httpx.HTTPError, UnboundedError, ValueError, KeyError, TypeError):
                _, body = await get(self._client, "/version", _MOST_VERSION_BYTES)
                self.version = str(orjson.loads(body)["version"])
        return None


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
