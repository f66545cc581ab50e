"""A backend's address, and how to connect to it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from backends.http.names import addresses_of
from backends.http.receiver import UpstreamError

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a backend.

    Examples
    --------
    >>> Address.parse("http://[::1]:8000")
    Address(host='::1', port=8000, authority=b'[::1]:8000', tls=False, path=None)
    >>> Address.parse("unix:/run/engine.sock").path
    '/run/engine.sock'
    """

    # host, port: the TCP address; an IPv6 host has no brackets.
    host: str
    port: int
    authority: bytes  # value of the `Host` header
    tls: bool = False
    path: str | None = None  # path of a Unix socket, used instead of host and port; None for TCP

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse `http://host[:port]`, `https://host[:port]` or `unix:/path/to.sock`."""
        if url.startswith("unix:"):
            path = url.removeprefix("unix:").removeprefix("//")
            if not path.startswith("/"):
                raise ValueError(f"{url!r}: a Unix socket needs an absolute path, unix:/path/to.sock")
            return cls("localhost", 0, b"localhost", path=path)
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{url!r}: expected http://host:port, https://host:port or unix:/path/to.sock")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.hostname, port, parts.netloc.rpartition("@")[2].encode("ascii"), parts.scheme == "https")


def host_and_port(host: str, port: int | str) -> str:
    """Return an address as in URLs: `10.0.0.1:8000`, `[::1]:8000`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def connect(
    address: Address, protocol: asyncio.Protocol, timeout_s: float, tls: ssl.SSLContext | None
) -> UpstreamError | None:
    """Connect a protocol to an address; return the error if that fails."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            if address.path is not None:
                await loop.create_unix_connection(lambda: protocol, address.path)
                return None
            server_name = address.host if tls else None

            async def create(host: str) -> None:
                await loop.create_connection(lambda: protocol, host, address.port, ssl=tls, server_hostname=server_name)

            *others, last = await addresses_of(address.host)
            for host in others:
                with contextlib.suppress(OSError):
                    await create(host)
                    return None
            await create(last)
    except TimeoutError:
        return UpstreamError("connect", f"accepted no connection within {timeout_s:g} s")
    except socket.gaierror as cause:
        return UpstreamError("connect", f"has an address that does not resolve ({cause.strerror})")
    except OSError as cause:
        if cause.errno in _EXHAUSTED:
            return UpstreamError("exhausted", f"could not be reached: the gateway is out of resources ({cause})")
        return UpstreamError("connect", f"refused the connection ({cause})")
    except Exception as cause:  # noqa: BLE001 -- such as an invalid name: the call must end in any case
        return UpstreamError("connect", f"could not be connected to ({cause!r})")
    return None
