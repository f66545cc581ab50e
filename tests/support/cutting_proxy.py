"""A TCP proxy that can forward a request and then cut the connection, so that the reply is lost."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class CuttingProxy:
    """Forwards connections to a port; while `cuts` is set, requests that contain a word get no reply."""

    def __init__(self, port: int, word: bytes) -> None:
        self._port = port
        self._word = word
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cuts = False
        self.cut = 0
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    def _start_thread(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed: the test is over
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [client, server]
                self._start_thread(self._forward, client, server)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        """Forward complete exchanges: a request, and all of its reply."""
        client.settimeout(0.02)
        server.settimeout(0.02)
        try:
            while True:
                request = _received(client)
                if request is None:
                    return
                if not request:
                    continue
                server.sendall(request)
                reply = b""
                while not reply:
                    reply = _received(server) or b""
                if self.cuts and self._word in request:
                    self.cut += 1
                    return
                client.sendall(reply)
        except OSError:
            return
        finally:
            client.close()
            server.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for opened in self._sockets:
            opened.close()
        for thread in self._threads:
            thread.join(5.0)


def _received(connection: socket.socket) -> bytes | None:
    """Return the bytes received until the connection is idle; None if it was closed."""
    received = b""
    while True:
        try:
            piece = connection.recv(65536)
        except TimeoutError:
            return received
        if not piece:
            return None
        received += piece


@contextlib.contextmanager
def cutting_proxy(port: int, word: bytes) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(port, word)
    proxy._start_thread(proxy._accept)
    try:
        yield proxy
    finally:
        proxy.close()
