"""Where a proxy reaches each replica, as `ip:port`: host names are resolved periodically."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from ipaddress import ip_address

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
    >>> Destinations([backend]).of(backend)
    '[::1]:8000'
    """

    def __init__(self, backends: Iterable[Backend]) -> None:
        self._backends = backends
        self._by_url: dict[str, str] = {}
        self._hosts: dict[str, Address] = {}  # by URL, if the host is a name
        self._logged = Seldom()

    def of(self, backend: Backend) -> str:
        """Return where the proxy reaches a replica; empty if its name has not been resolved yet, or it has no port."""
        if backend.url not in self._by_url:
            self._add(backend.url)
        return self._by_url[backend.url]

    def _add(self, url: str) -> None:
        address = Address.parse(url)
        self._by_url[url] = ""
        if address.path is not None:
            log.warning("%s: a proxy cannot be sent to a Unix socket; this replica gets no requests", url)
            return
        try:
            self._by_url[url] = host_and_port(str(ip_address(address.host)), address.port)
        except ValueError:  # a host name
            self._hosts[url] = address

    async def look_up_regularly(self) -> None:
        """Resolve all names periodically."""
        while True:
            await asyncio.sleep(_AGAIN_S)
            await self.look_up()

    async def look_up(self) -> None:
        """Resolve the host names of all replicas; one that fails keeps its old address."""
        present = {backend.url for backend in self._backends}
        for url in self._by_url.keys() - present:
            del self._by_url[url]
            self._hosts.pop(url, None)
        for url in present - self._by_url.keys():
            self._add(url)
        await asyncio.gather(*(self._resolve(url, address) for url, address in self._hosts.items()))

    async def _resolve(self, url: str, address: Address) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the second is for an invalid name
            if self._logged.may_say(url):
                log.warning("%s: %s cannot be resolved: %s; logged once a minute", url, address.host, error)
            return
        host, port = found[0][4][:2]
        self._by_url[url] = host_and_port(str(host), int(port))
