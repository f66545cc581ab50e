"""Listening at sockets that the process opens, or that were passed to it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import cast

from backends import background
from backends.background import Seldom
from backends.validation import UsageError
from gateway.config.settings import PoolSettings
from gateway.config.settings.keys import address_of
from gateway.http.connection import ServerConnection
from gateway.http.server import HttpServer
from gateway.listening.certificate import PATIENCE_S, Certificate

log = logging.getLogger(__name__)


class ListenError(Exception):
    """Raised if the gateway cannot listen at an address."""


_BACKLOG = 2048
_FULL_PAUSE_S = 0.5
_HANDSHAKE_SHARE = 8
"""At most one in this many of the allowed connections may be in a TLS handshake."""
_TLS_S, _TLS_CLOSE_S = 10.0, 2.0
_LETTERS = [bytes([letter]) for letter in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]  # first bytes of a request in clear text
_MOST_HEAD = 1 << 16
_NOT_TLS = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: 97\r\nconnection: close\r\n\r\n"
    b'{"error": {"message": "This address speaks TLS: use https://.", "type": "invalid_request_error"}}'
)
_HANDSHAKE_S = 0.25
"""Most seconds between a client's first packet and its next."""
_LAST_S = 5.0
_POLL_S = 0.01
_SO_ATTACH_FILTER = 26
# Classic BPF on the flags of the TCP header: drop packets with SYN but not ACK, pass all others.
_NO_SYN = ((0x30, 0, 0, 13), (0x54, 0, 0, 0x12), (0x15, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
_TCP_INFO_WAITING = 24
"""Offset in the `struct tcp_info` of a listening socket of the number of connections that wait to be accepted."""


class Listener:
    """Accepts the connections of an HTTP server at a socket."""

    def __init__(self, server: HttpServer, opened: socket.socket, certificate: Certificate | None = None) -> None:
        self._server = server
        self._opened = opened
        self._certificate = certificate  # for TLS; None without
        # Connections in the TLS handshake; the first is the oldest.
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._logged = Seldom()
        self._is_own = not is_listening(opened)
        self._accepting: asyncio.Server | None = None

    async def start(self) -> None:
        """Accept connections."""
        if self._certificate is not None:
            self._opened.setblocking(False)
            self._opened.listen(_BACKLOG)
            self._accept_tls()
            return
        loop = asyncio.get_running_loop()
        self._accepting = await loop.create_server(self._connect, sock=self._opened, backlog=_BACKLOG)

    def _connect(self) -> asyncio.Protocol:
        # The protocol does not inherit from `asyncio.Protocol`, so that mypyc can compile it.
        return cast("asyncio.Protocol", ServerConnection(self._server))

    async def close(self, *, is_shared: bool) -> None:
        """Stop listening without losing a connection that has begun, or if others share the port, is on its way."""
        if self._is_own:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_S):
                    await _accept_last(self._opened, _HANDSHAKE_S if is_shared else 0.0)
        if self._accepting is not None:
            self._accepting.close()
        elif self._opened.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._opened)
            self._opened.close()
        if self._handshakes:
            await asyncio.wait(self._handshakes, timeout=_LAST_S)

    def _accept_tls(self) -> None:
        if self._opened.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._opened, self._accept_one)

    def _accept_one(self) -> None:
        """Accept a connection and begin its handshake; if there are too many, cancel the oldest."""
        loop = asyncio.get_running_loop()
        try:
            accepted, _ = self._opened.accept()
        except (BlockingIOError, ConnectionAbortedError):  # another process was faster, or its client has gone
            return
        except OSError:  # out of file descriptors, which is logged elsewhere
            loop.remove_reader(self._opened)
            loop.call_later(_FULL_PAUSE_S, self._accept_tls)
            return
        if len(self._handshakes) >= max(1, self._server.limits.connections // _HANDSHAKE_SHARE):
            oldest = next(iter(self._handshakes))
            del self._handshakes[oldest]  # now: it ends later, and must not be cancelled in place of the next
            oldest.cancel()
        task = background.start("connections", self._begin_tls(accepted))
        self._handshakes[task] = None
        task.add_done_callback(lambda task: self._handshakes.pop(task, None))

    async def _begin_tls(self, accepted: socket.socket) -> None:
        """Begin TLS on a connection; close it if that takes too long, or it speaks something else."""
        assert self._certificate is not None
        loop = asyncio.get_running_loop()
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        is_taken = False
        try:
            async with asyncio.timeout(_TLS_S):
                if await _first_byte(accepted) in _LETTERS:
                    accepted.recv(_MOST_HEAD)  # unread data would reset the connection before the answer
                    accepted.send(_NOT_TLS)
                    return
                if (looking := self._certificate.look()) is not None:
                    await asyncio.wait({asyncio.wrap_future(looking)}, timeout=PATIENCE_S)
                await loop.connect_accepted_socket(
                    self._connect, accepted, ssl=self._certificate.context, ssl_shutdown_timeout=_TLS_CLOSE_S
                )
                is_taken = True
        except OSError as error:  # includes ssl.SSLError and the timeout
            if self._logged.may_say():
                log.info("a TLS connection did not begin (%s); logged once a minute", str(error) or "too slow")
        finally:
            if not is_taken:
                accepted.close()


async def _first_byte(accepted: socket.socket) -> bytes:
    """Return the first byte that a client sends, without consuming it."""
    loop, has_come = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(accepted, has_come.set)
    try:
        await has_come.wait()
    finally:
        loop.remove_reader(accepted)
    return accepted.recv(1, socket.MSG_PEEK)


async def _accept_last(opened: socket.socket, handshake_s: float) -> None:
    """Wait until all connections that have begun are accepted.

    The kernel has assigned them to this socket, and resets them when it is closed. Meanwhile it drops packets that
    begin others: their clients resend them a second later, to another socket of the port.
    """
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in _NO_SYN))
    with contextlib.suppress(OSError):
        program = struct.pack("HL", len(_NO_SYN), ctypes.addressof(code))
        opened.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    await asyncio.sleep(handshake_s)
    while _waiting(opened):  # noqa: ASYNC110 -- the kernel has no event for it
        await asyncio.sleep(_POLL_S)


def _waiting(opened: socket.socket) -> int:
    """Return how many connections wait to be accepted."""
    info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_WAITING + 4)
    return int.from_bytes(info[_TCP_INFO_WAITING:], sys.byteorder)


def is_listening(opened: socket.socket) -> bool:
    """Return whether a socket listens already, as passed ones do."""
    return bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def open_sockets(
    settings: PoolSettings, passed: Mapping[str, socket.socket], others: Mapping[str, tuple[str, str]]
) -> Iterator[socket.socket]:
    """Yield a socket for each address, in order: one that was passed, or is bound here.

    Parameters
    ----------
    others
        Further addresses by name, each with the option that sets it.

    Raises
    ------
    ListenError
        If one of them cannot be bound.
    """
    server, admin = settings.server, settings.admin
    wanted = {"clients": (server.host, server.port, "--host and --port")}
    if admin.listen is not None:
        wanted["admin"] = (*address_of(admin.listen), "admin.listen")
    elif "admin" in passed:
        raise UsageError("LISTEN_FDS: a socket was passed for admin, but admin.listen is not set")
    wanted |= {name: (*address_of(address), option) for name, (address, option) in others.items()}
    shares = server.reuse_port or server.workers > 1
    known = set[tuple[str, int]]()  # with server.reuse_port the kernel would let them share one
    for name, (host, port, options) in wanted.items():
        try:
            opened = passed.get(name) or listen(host, port, shared=shares, checked=server.reuse_port)
        except (OSError, UnicodeError) as error:  # the second is for an invalid host name
            reason = error.strerror if isinstance(error, OSError) else "no such name"
            raise ListenError(
                f"cannot listen on {host} port {port}: {reason}\nChoose another with {options}, or stop the "
                "program that listens there; of two gateways with server.reuse_port, the second takes over."
            ) from None
        if opened.getsockname() in known:
            opened.close()
            raise ListenError(f"{options}: {host} port {port} is another address of this gateway; choose another port")
        known.add(opened.getsockname())
        yield opened


def listen(host: str, port: int, *, shared: bool, checked: bool = False) -> socket.socket:
    """Return a bound socket to serve on."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, family=0, type=socket.SOCK_STREAM)[0]
    if shared and port and not checked:
        listen(host, port, shared=False).close()  # SO_REUSEPORT would silently share a port with another program
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        opened.bind(address)
    except OSError:
        opened.close()
        raise
    return opened
