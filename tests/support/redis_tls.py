"""A real Redis behind TLS."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from backends.launch.ports import free_port
from tests.support.certificates import make_pair
from tests.support.redis_server import redis_server


@contextlib.contextmanager
def tls_redis(password: str) -> Iterator[tuple[str, Path]]:
    """Yield the address of a Redis that speaks TLS only, and the certificate that it has signed itself."""
    with tempfile.TemporaryDirectory() as folder:
        pair, port = make_pair(Path(folder) / "redis"), free_port()
        files = ["--tls-cert-file", str(pair.certificate), "--tls-key-file", str(pair.key), "--tls-auth-clients", "no"]
        # Its plain port is for `RedisServer` only, which waits for it.
        with redis_server("--tls-port", str(port), *files) as server:
            server.client.config_set("requirepass", password)
            yield f"127.0.0.1:{port}", pair.certificate
