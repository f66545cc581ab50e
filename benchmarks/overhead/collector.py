"""A collector that takes everything that OpenTelemetry exports to it, and keeps nothing."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def _serve(pipe: Connection) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    pipe.send(server.server_address[1])
    server.serve_forever()


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """Run a collector in a process of its own; yield its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()
