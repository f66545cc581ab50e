"""The certificate that the picker shows, to a real TLS client."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from gateway.config.settings.picker import PickerTlsSettings
from gateway.picker.certificate import credentials, read_pair
from tests.support.deploy_tools import tool


def self_signed(folder: Path, name: str) -> PickerTlsSettings:
    """Make a certificate for localhost, as docs/kubernetes.md does."""
    tls = PickerTlsSettings(certificate=folder / f"{name}.crt", key=folder / f"{name}.key")
    made = ("-keyout", tls.key, "-out", tls.certificate, "-days", "2", "-subj", "/CN=picker")
    names = ("-addext", "subjectAltName=DNS:localhost")
    subprocess.run(
        [
            tool("openssl"),
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            *made,
            *names,
        ],
        check=True,
        capture_output=True,
    )
    return tls


async def test_grpc_shows_the_certificate_that_the_files_hold_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls, later = self_signed(tmp_path, "first"), self_signed(tmp_path, "later")
    first = tls.certificate.read_text()
    server = grpc.aio.server()
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_secure_port("127.0.0.1:0", credentials(tls))
    await server.start()

    async def shown() -> str:
        return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))

    try:
        trusted = grpc.ssl_channel_credentials(first.encode())
        async with grpc.aio.secure_channel(f"localhost:{port}", trusted) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert await shown() == first
        tls.key.write_bytes(later.key.read_bytes())
        with caplog.at_level(logging.WARNING):
            assert await shown() == first, "the key is new, the certificate is not yet"
        assert "the certificate shown before is kept" in caplog.text
        tls.certificate.write_bytes(later.certificate.read_bytes())
        assert await shown() == later.certificate.read_text()
    finally:
        await server.stop(None)


def test_a_key_of_another_certificate_is_refused_before_anything_starts(tmp_path: Path) -> None:
    tls, other = self_signed(tmp_path, "one"), self_signed(tmp_path, "other")
    with pytest.raises(OSError, match="KEY_VALUES_MISMATCH"):
        read_pair(PickerTlsSettings(certificate=tls.certificate, key=other.key))
    pool = tmp_path / "pool.yaml"
    backend = "{method: baseline, url: 'http://127.0.0.1:9'}"
    pool.write_text(
        f"models: {{m: {{policy: {{name: random}}, default_temperature: 1, backends: {{a: {backend}}}}}}}\n"
        f"picker: {{tls: {{certificate: {tls.certificate}, key: {tmp_path}/absent.key}}}}\n"
    )
    command = [sys.executable, "-m", "gateway", "picker", "--config", pool, "--port", "0", "--listen", "127.0.0.1:0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    files = f"{tls.certificate} and {tmp_path}/absent.key"
    assert ended.stderr == f"{pool}: picker.tls: {files}: No such file or directory\n"
