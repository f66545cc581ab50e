"""Addresses of hosts by name: the last ones are used while a name does not resolve, as when a name server restarts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import socket
import time
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final

import httpcore

from backends import background

log = logging.getLogger(__name__)

_KEPT_S: Final = 3600.0
_UNKNOWN_KEPT_S: Final = 300.0
"""Seconds for which addresses are used when no answer comes, and when the answer is that there is no such name."""
_UNKNOWN: Final = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})
_PATIENCE_S: Final = 0.5
"""Seconds for which an answer is awaited if other addresses are known."""
_MOST_NAMES: Final = 10_000


class _Name:
    """What is known of a name."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.resolved_s = self.asked_s = -math.inf
        self.lookup: asyncio.Task[None] | None = None

    async def look_up(self, host: str) -> None:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        self.addresses, self.resolved_s = [str(address[0]) for *_, address in found], time.monotonic()


async def addresses_of(host: str) -> list[str]:
    """Return the addresses of a host, best first; if its name does not resolve, the last known ones.

    Raises
    ------
    OSError
        The name does not resolve, and did not for too long.
    """
    if not _is_resolved_here(host):
        return [host]
    if host not in _names and len(_names) >= _MOST_NAMES:
        _names.clear()
    name, now_s = _names.setdefault(host, _Name()), time.monotonic()
    if name.lookup is None or name.lookup.done():  # one at a time, as each takes a thread
        name.lookup = background.start("connections", name.look_up(host), of=host, raises=Exception)
        name.asked_s = now_s
    lookup, age_s = name.lookup, now_s - name.resolved_s
    await asyncio.wait((lookup,), timeout=max(0.0, name.asked_s + _PATIENCE_S - now_s) if age_s < _KEPT_S else None)
    error = lookup.exception() if lookup.done() else TimeoutError(f"no answer within {_PATIENCE_S:g} s")
    if error is not None:
        is_unknown = isinstance(error, socket.gaierror) and error.errno in _UNKNOWN
        if age_s >= (_UNKNOWN_KEPT_S if is_unknown else _KEPT_S):
            raise error
        if _logged.may_say(host):
            text = "%s does not resolve (%s): its last addresses, %s, are used; logged once a minute"
            log.warning(text, host, error, ", ".join(name.addresses))
    return name.addresses


@functools.lru_cache
def _is_resolved_here(host: str) -> bool:
    """Return whether a host is neither an address nor `localhost`, which needs no name server."""
    with contextlib.suppress(ValueError):
        ip_address(host)
        return False
    return host != "localhost"


class NamedNetwork(httpcore.AnyIOBackend):
    """The network of httpx, with `addresses_of`."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 -- as httpcore calls it
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address that accepts, each in its share of the time."""
        try:
            async with asyncio.timeout(timeout):
                *others, last = await addresses_of(host)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        share_s = None if timeout is None else timeout / (len(others) + 1)
        for address in others:
            with contextlib.suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await super().connect_tcp(address, port, share_s, local_address, socket_options)
        return await super().connect_tcp(last, port, share_s, local_address, socket_options)


_names: Final[dict[str, _Name]] = {}
_logged: Final = background.Seldom()
