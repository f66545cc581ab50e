"""One look at a replica: does it live, does it serve the model, how loaded is it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

from backends.backend import Backend
from backends.engine_metrics import EngineMetrics, read_metrics


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one look found.

    Parameters
    ----------
    problem
        What is wrong, for a person; None if the replica is well.
    refused
        True if nothing listens there, which leaves no doubt.
    engine
        What its metrics page said; None if it has none.
    """

    problem: str | None = None
    refused: bool = False
    engine: EngineMetrics | None = None


class Probe:
    """Looks at one replica over HTTP.

    Attributes
    ----------
    model_card
        The replica's own entry for the model in `/v1/models`, as last seen.
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

    async def look(self, *, admit: bool) -> ProbeResult:
        """Probe the replica.

        Parameters
        ----------
        admit
            True if it is to be let in on success: then it must also list the model it is to serve.
        """
        try:
            health = await self._client.get("/health")
            if health.status_code not in {200, 404}:  # 404: not vLLM, but perhaps something that speaks like it
                return ProbeResult(f"/health answered {health.status_code}")
            if admit or health.status_code == 404 or self.model_card is None:
                problem = await self._check_model()
                if problem is not None:
                    return ProbeResult(problem)
            page = await self._client.get("/metrics")
        except httpx.ConnectError as error:
            return ProbeResult(f"refuses connections ({error})", refused=True)
        except httpx.TimeoutException:
            return ProbeResult("does not answer its health check in time")
        except httpx.HTTPError as error:
            return ProbeResult(f"fails its health check ({type(error).__name__}: {error})")
        return ProbeResult(engine=read_metrics(page.content) if page.status_code == 200 else None)

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
            return "/v1/models answered garbage"
        if self._model not in served:
            names = ", ".join(sorted(served)) or "nothing"
            return f"serves {names}, not {self._model}: start it with --served-model-name {self._model}"
        self.model_card = served[self._model]
        return None
