"""A real Redis behind TLS."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from backends.launch.ports import free_port
from tests.support.redis_server import redis_server


@contextlib.contextmanager
def tls_redis(password: str) -> Iterator[tuple[str, Path]]:
    """Yield the address of a Redis that speaks TLS only, and the certificate that it has signed itself."""
    with tempfile.TemporaryDirectory() as folder:
        key, certificate = Path(folder) / "key.pem", Path(folder) / "certificate.pem"
        command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
        subprocess.run(
            [*command.split(), "-addext", names, "-keyout", str(key), "-out", str(certificate)],
            check=True,
            capture_output=True,
        )
        port = free_port()
        files = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
        # Its plain port is for `RedisServer` only, which waits for it.
        with redis_server("--tls-port", str(port), *files) as server:
            server.client.config_set("requirepass", password)
            yield f"127.0.0.1:{port}", certificate
