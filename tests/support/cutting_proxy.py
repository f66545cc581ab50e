"""A TCP proxy that can pass a request on and then cut the connection, so that its answer is lost."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class CuttingProxy:
    """Passes connections on to a port; those that send a certain word get no more answers while it cuts."""

    def __init__(self, port: int, word: bytes) -> None:
        self._port = port
        self._word = word
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cuts = False
        self.cut = 0
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    def _begin(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed: the test is over
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [client, server]
                self._begin(self._pass_on, client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        """Pass whole exchanges on: what a client sends in one go, and all of its answer."""
        client.settimeout(0.02)
        server.settimeout(0.02)
        try:
            while True:
                sent = _received(client)
                if sent is None:
                    return
                if not sent:
                    continue
                server.sendall(sent)
                answer = b""
                while not answer:
                    answer = _received(server) or b""
                if self.cuts and self._word in sent:
                    self.cut += 1
                    return
                client.sendall(answer)
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
    """Return what comes until nothing comes for a moment; None if the other side is gone."""
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
    proxy._begin(proxy._accept)
    try:
        yield proxy
    finally:
        proxy.close()
