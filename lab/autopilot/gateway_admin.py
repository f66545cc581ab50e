"""The running gateway, as the autopilot uses it: its `/admin` endpoints, and a request of its own for one replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from backends.speculation import SpeculativeConfig
from lab.autopilot.journal import Speculation

_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
LOOK_S = 0.5
UP = ("up", "recovering")
"""States in which a replica gets requests."""
_TRIAL = {"prompt": "def add(a, b):\n    return", "max_tokens": 8, "temperature": 0}


class ChangeError(Exception):
    """A change could not be made, or not be completed; the message says what is the case now."""


@dataclass(frozen=True, slots=True)
class GatewayAdmin:
    """One model of a running gateway.

    Parameters
    ----------
    url
        Address of the clients.
    admin_url
        Address of `/admin`.
    admin_key
        A key with the scope `write`.
    key
        A client's key that may choose backends; None for a gateway without keys.
    """

    url: str
    admin_url: str
    model: str
    admin_key: str
    key: str | None = None

    async def backends(self) -> dict[str, dict[str, Any]]:
        """Return the state of each replica, by name."""
        pool = await self._admin("GET", "/admin/pool")
        try:
            found: dict[str, dict[str, Any]] = pool["models"][self.model]["backends"]
        except (KeyError, TypeError):
            raise ChangeError(f"{self.admin_url} has no model {self.model}") from None
        return found

    async def serves(self, backend: str, runs: Speculation) -> bool:
        """Return whether a replica speculates like this, by the settings in effect."""
        config = await self._admin("GET", "/admin/config")
        settings = config["models"][self.model]["backends"][backend]
        given = settings["speculative_config"] or {}
        wanted = SpeculativeConfig.model_validate(runs.config).model_dump(mode="json") if runs.config else {}
        return bool(settings["method"] == runs.method.value and given == wanted)

    async def drain(self, backend: str, *, move: bool) -> None:
        """Send a replica no more requests; with `move`, have others go on with its streams."""
        await self._admin("POST", "/admin/drain", {"model": self.model, "backend": backend, "move": move})

    async def resume(self, backend: str) -> None:
        """Send a replica requests again."""
        await self._admin("POST", "/admin/resume", {"model": self.model, "backend": backend})

    async def reload(self, restart: str | None = None, *, dry_run: bool = False) -> list[str]:
        """Have the gateway read its pool file again; return what has changed."""
        query = {"dry_run": "true"} if dry_run else {}
        query |= {} if restart is None else {"restart": f"{self.model}/{restart}"}
        answer = await self._admin("POST", "/admin/reload", None, query)
        return list(answer["changes"])

    async def try_out(self, backend: str) -> None:
        """Have a replica answer a short request."""
        headers = {"x-gateway-backend": backend}
        headers |= {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        body = {"model": self.model, **_TRIAL}
        answer = await _ask("POST", f"{self.url}/v1/completions", headers, body, {})
        if answer.status_code != httpx.codes.OK or answer.headers.get("x-gateway-backend") != backend:
            hint = "; give --key-file a key that may" if answer.status_code in (401, 403) else ""
            raise ChangeError(f"{backend} does not answer a request: {answer.status_code} {_message(answer)}{hint}")

    async def until(self, what: str, holds: Callable[[Mapping[str, Any]], bool], limit_s: float) -> None:
        """Wait until a condition holds for the replicas.

        Raises
        ------
        ChangeError
            If it does not hold in time, or the condition raises it.
        """
        end_s = time.monotonic() + limit_s
        while not holds(await self.backends()):
            if time.monotonic() > end_s:
                raise ChangeError(f"{what}: not within {limit_s:g} s")
            await asyncio.sleep(LOOK_S)

    async def _admin(self, method: str, path: str, json: object = None, query: Mapping[str, str] | None = None) -> Any:
        headers = {"authorization": f"Bearer {self.admin_key}"}
        answer = await _ask(method, self.admin_url + path, headers, json, query or {})
        if answer.status_code != httpx.codes.OK:
            raise ChangeError(f"{self.admin_url}{path} answered {answer.status_code}: {_message(answer)}")
        try:
            return answer.json()
        except ValueError:
            raise ChangeError(f"{self.admin_url}{path} answered, but not as a gateway does") from None


async def _ask(
    method: str, url: str, headers: Mapping[str, str], json: object, query: Mapping[str, str]
) -> httpx.Response:
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False) as client:
            return await client.request(method, url, headers=dict(headers), json=json, params=dict(query))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ChangeError(f"{url} cannot be reached: {type(error).__name__} {error}") from None


def _message(answer: httpx.Response) -> str:
    try:
        document = answer.json()
        return str(document["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
