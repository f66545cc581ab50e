"""Finds what is wrong with an address that was taken for an engine's."""

from __future__ import annotations

import asyncio
from typing import Final

import httpx

from backends.http.authorities import trusted
from backends.http.bounded import PLAIN, fetch
from backends.probe import ProbeResult, as_json

_MOST_BYTES: Final = 1 << 20
_TIMEOUT_S: Final = 2.0
_NOT_UNDERSTOOD = 400
"""Status with which HTTPS servers answer plain HTTP."""


async def mistaken(url: str, result: ProbeResult) -> str:
    """Return what is wrong with an address: a gateway answers, or the scheme is the other one; empty if nothing is."""
    if result.refused or url.startswith("unix:"):
        return ""
    verify = await asyncio.to_thread(trusted)
    async with httpx.AsyncClient(headers=PLAIN, timeout=_TIMEOUT_S, trust_env=False, verify=verify) as client:
        try:
            if result.problem is None or result.status not in {None, _NOT_UNDERSTOOD}:
                _, body = await fetch(client, f"{url}/readyz", _MOST_BYTES)
                match as_json(body):
                    case {"ready": bool()}:
                        return "is a gateway, not an engine: name the engines behind it"
                return ""
            scheme = "http" if url.startswith("https:") else "https"
            other = f"{scheme}:{url.partition(':')[2]}"
            status, _ = await fetch(client, f"{other}/health", _MOST_BYTES)
            speaks = status != _NOT_UNDERSTOOD
        except httpx.ConnectError as error:
            speaks = "CERTIFICATE_VERIFY_FAILED" in str(error)
        except httpx.HTTPError:
            speaks = False
    return f"speaks {scheme}: write {other}" if speaks else ""
