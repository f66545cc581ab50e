"""Health probe of a replica: whether it responds, whether it serves the model, and its load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

from backends.backend import Backend
from backends.default_temperature import reported_temperature
from backends.engine_metrics import EngineMetrics, read_metrics


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The outcome of one probe.

    Parameters
    ----------
    problem
        What is wrong, in words; None if the replica is healthy.
    refused
        True if nothing listens at the address, which needs no second probe to confirm.
    late
        True if it did not answer in time.
    engine
        The replica's metrics; None if it has no such page.

    Examples
    --------
    >>> ProbeResult("/health answered 503").problem
    '/health answered 503'
    """

    problem: str | None = None
    refused: bool = False
    late: bool = False
    engine: EngineMetrics | None = None


class Probe:
    """The HTTP health probe of one replica.

    Attributes
    ----------
    model_card
        The model's entry in the replica's `/v1/models`, as last read; None before.
    """

    def __init__(self, backend: Backend, timeout_s: float) -> None:
        self._model = backend.model
        headers = {"authorization": f"Bearer {backend.api_key}"} if backend.api_key else {}
        base, uds = backend.url, None
        if base.startswith("unix:"):
            base, uds = "http://localhost", base.removeprefix("unix:").removeprefix("//")
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=uds, verify=base.startswith("https:"), trust_env=False),
            base_url=base,
            headers=headers,
            timeout=timeout_s,
        )
        self.model_card: dict[str, object] | None = None

    async def run(self, *, admit: bool) -> ProbeResult:
        """Probe the replica.

        Parameters
        ----------
        admit
            True if success admits the replica; it must then also list its model.
        """
        try:
            health = await self._client.get("/health")
            if health.status_code not in {200, 404}:  # 404: not vLLM, but perhaps an OpenAI-compatible server
                return ProbeResult(f"/health answered {health.status_code}")
            if admit or health.status_code == 404 or self.model_card is None:
                problem = await self._check_model()
                if problem is not None:
                    return ProbeResult(problem)
            page = await self._client.get("/metrics")
        except httpx.ConnectError as error:
            return ProbeResult(f"refuses connections ({error})", refused=True)
        except httpx.TimeoutException:
            return ProbeResult("does not answer its health check in time", late=True)
        except httpx.HTTPError as error:
            return ProbeResult(f"fails its health check ({type(error).__name__}: {error})")
        return ProbeResult(engine=read_metrics(page.content) if page.status_code == 200 else None)

    def set_timeout(self, timeout_s: float) -> None:
        """Set the seconds until a probe times out."""
        self._client.timeout = httpx.Timeout(timeout_s)

    async def default_temperature(self) -> float | None:
        """Return the temperature that the engine reports for a request without one; None if it reports none."""
        return await reported_temperature(self._client, self._model)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _check_model(self) -> str | None:
        answer = await self._client.get("/v1/models")
        if answer.status_code in {401, 403}:
            return f"/v1/models answered {answer.status_code}: set the backend's api_key"
        if answer.status_code != 200:
            return f"/v1/models answered {answer.status_code}"
        try:
            cards: list[dict[str, Any]] = json.loads(answer.content)["data"]
            served = {str(card["id"]): card for card in cards}
        except (ValueError, KeyError, TypeError):
            return "/v1/models did not answer with a list of models"
        if self._model not in served:
            names = ", ".join(sorted(served)) or "nothing"
            return f"serves {names}, not {self._model}: start it with --served-model-name {self._model}"
        self.model_card = served[self._model]
        return None
