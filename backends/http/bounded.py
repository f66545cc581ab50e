"""Bounded reads of a replica's answers, whatever it sends."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import httpx

PLAIN = {"accept-encoding": "identity"}
"""Headers of requests whose answers are read here: the size of a compressed body is unknown until it is unpacked."""


class UnboundedError(httpx.HTTPError):
    """An answer is longer than any should be, or compressed without being asked."""


async def parts_of(answer: httpx.Response, most_bytes: int) -> AsyncIterator[bytes]:
    """Yield the parts of a body as they arrive; it may take twice the time-out of a read."""
    end_s = time.monotonic() + 2.0 * answer.request.extensions["timeout"]["read"]
    path, encoding = answer.request.url.path, answer.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise UnboundedError(f"{path} came compressed ({encoding[:20]}), which was not asked for")
    size_bytes = 0
    async for part in answer.aiter_raw():
        size_bytes += len(part)
        if size_bytes > most_bytes:
            raise UnboundedError(f"{path} is longer than {most_bytes} bytes")
        if time.monotonic() > end_s:
            raise httpx.ReadTimeout(f"{path} trickles", request=answer.request)
        yield part


async def fetch(
    client: httpx.AsyncClient, path: str, most_bytes: int, *, method: str = "GET", body: object = None
) -> tuple[int, bytes]:
    """Send a request, with `body` as JSON; return status and body of the answer, or raise what `parts_of` does.

    The client's headers should include `PLAIN`.
    """
    async with client.stream(method, path, json=body) as answer:
        return answer.status_code, b"".join([part async for part in parts_of(answer, most_bytes)])
