"""Where a proxy reaches each replica, as `ip:port`: names in their addresses are looked up, and looked up again."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from ipaddress import ip_address

from backends import background
from backends.backend import Backend
from backends.background import Seldom
from backends.http.address import Address, host_and_port

log = logging.getLogger(__name__)

_AGAIN_S = 10.0


class Destinations:
    """The destinations of replicas, by their addresses.

    Examples
    --------
    >>> from backends.speculation import Method
    >>> backend = Backend("a", "m", Method.BASELINE, "http://[::1]:8000")
    >>> Destinations().of(backend)
    '[::1]:8000'
    """

    def __init__(self) -> None:
        self._by_url: dict[str, str] = {}
        self._hosts: dict[str, Address] = {}  # by URL, those with a name
        self._backends: Iterable[Backend] = ()
        self._lookup: asyncio.Task[None] | None = None
        self._logged = Seldom()

    def of(self, backend: Backend) -> str:
        """Return where the proxy reaches a replica; empty if its name has not been resolved yet, or it has no port."""
        known = self._by_url.get(backend.url)
        if known is not None:
            return known
        return self._add(backend.url)

    async def start(self, backends: Iterable[Backend]) -> None:
        """Look up the names in the addresses of replicas, once now and then regularly."""
        self._backends = backends
        await self._look_up()
        self._lookup = background.keep_running("picker", self._look_up_regularly, of="destinations")

    async def stop(self) -> None:
        """Stop looking up names."""
        if self._lookup is not None:
            self._lookup.cancel()
            await asyncio.gather(self._lookup, return_exceptions=True)

    def _add(self, url: str) -> str:
        address = Address.parse(url)
        destination = ""
        if address.path is None:
            try:
                destination = host_and_port(str(ip_address(address.host)), address.port)
            except ValueError:  # a name
                self._hosts[url] = address
        else:
            log.warning("%s: a proxy cannot be sent to a Unix socket; this replica gets no requests", url)
        self._by_url[url] = destination
        return destination

    async def _look_up_regularly(self) -> None:
        while True:
            await asyncio.sleep(_AGAIN_S)
            await self._look_up()

    async def _look_up(self) -> None:
        """Resolve all names; one that cannot be resolved keeps the address that it had."""
        present = {backend.url for backend in self._backends}
        for url in self._by_url.keys() - present:
            del self._by_url[url]
            self._hosts.pop(url, None)
        for url in present - self._by_url.keys():
            self._add(url)
        loop = asyncio.get_running_loop()
        for url, address in list(self._hosts.items()):
            try:
                found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:  # the second of a name that can be none
                if self._logged.may_say(url):
                    log.warning("%s: %s cannot be resolved: %s; logged once a minute", url, address.host, error)
                continue
            host, port = found[0][4][:2]
            self._by_url[url] = host_and_port(str(host), int(port))
