"""The certificate of the picker's address."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from backends.validation import UsageError
from gateway.config.settings import PickerTlsSettings
from gateway.picker.tls import Certificate
from tests.support.command import gateway_command, until
from tests.support.upstream import upstreams_in_thread

POOL = """
models:
  m: {{policy: {{name: round_robin}}, backends: {{a: {{method: baseline, url: "{url}"}}}}}}
picker:
  tls: {{certificate: "{tls.certificate}", key: "{tls.key}"}}
"""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[PickerTlsSettings]:
    folder = tmp_path_factory.mktemp("tls")
    made = []
    for number in range(2):
        settings = PickerTlsSettings(certificate=folder / f"{number}.crt", key=folder / f"{number}.key")
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
        names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        files = ["-keyout", str(settings.key), "-out", str(settings.certificate)]
        subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
        made.append(settings)
    return made


@pytest.fixture
def used(pairs: list[PickerTlsSettings], tmp_path: Path) -> PickerTlsSettings:
    """A copy of the first pair, whose files may be replaced."""
    used = PickerTlsSettings(certificate=tmp_path / "tls.crt", key=tmp_path / "tls.key")
    replace(used.certificate, pairs[0].certificate)
    replace(used.key, pairs[0].key)
    return used


def replace(file: Path, by: Path) -> None:
    """Replace a file as a whole, as kubelets do."""
    os.replace(shutil.copy(by, file.with_suffix(".new")), file)


def test_files_that_cannot_be_used_are_named(pairs: list[PickerTlsSettings], tmp_path: Path) -> None:
    mixed = PickerTlsSettings(certificate=pairs[0].certificate, key=pairs[1].key)
    missing = PickerTlsSettings(certificate=tmp_path / "none.crt", key=pairs[0].key)
    for settings in (mixed, missing):
        with pytest.raises(UsageError, match=f"{settings.certificate} and {settings.key} cannot be used"):
            Certificate(settings)


def test_half_of_a_new_pair_changes_nothing(
    pairs: list[PickerTlsSettings], used: PickerTlsSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.picker.tls")
    certificate = Certificate(used)
    assert certificate.renewed() is None
    assert not caplog.messages
    replace(used.certificate, pairs[1].certificate)
    assert certificate.renewed() is None
    assert certificate.renewed() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    replace(used.key, pairs[1].key)
    assert certificate.renewed() is not None
    assert caplog.messages[-1] == f"picker.tls: {used.certificate} has been read again"
    assert certificate.renewed() is None


@pytest.mark.slow
def test_a_renewed_certificate_is_shown_without_a_restart(
    pairs: list[PickerTlsSettings], used: PickerTlsSettings, tmp_path: Path
) -> None:
    def serves(trusted: PickerTlsSettings) -> bool:
        credentials = grpc.ssl_channel_credentials(trusted.certificate.read_bytes())
        with grpc.secure_channel(command.picker, credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                HealthCheckRequest.SerializeToString,
                HealthCheckResponse.FromString,
            )
            try:
                answer = check(HealthCheckRequest(service="liveness"), timeout=10)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                return False
            return answer.status == HealthCheckResponse.SERVING

    pool = tmp_path / "pool.yaml"
    with upstreams_in_thread("a", "m") as (upstream,):
        pool.write_text(POOL.format(url=upstream.url, tls=used))
        with gateway_command(pool, tmp_path, "--listen", "127.0.0.1:0", subcommand="picker") as command:
            assert serves(pairs[0])
            assert not serves(pairs[1])
            replace(used.certificate, pairs[1].certificate)
            replace(used.key, pairs[1].key)
            until(lambda: serves(pairs[1]))
            assert not serves(pairs[0])
