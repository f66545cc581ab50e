"""The certificate of the picker's address."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from backends.validation import UsageError
from gateway.config.settings import TlsSettings
from gateway.listening.certificate import Certificate
from tests.gateway.rooms.picker.test_server import listening
from tests.support.certificates import copied, make_pair, replace
from tests.support.waiting import eventually_async


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[TlsSettings]:
    folder = tmp_path_factory.mktemp("tls")
    return [make_pair(folder / str(number)) for number in range(2)]


@pytest.fixture
def used(pairs: list[TlsSettings], tmp_path: Path) -> TlsSettings:
    """A copy of the first pair, whose files may be replaced."""
    return copied(pairs[0], tmp_path)


def test_files_that_cannot_be_used_are_named(pairs: list[TlsSettings], tmp_path: Path) -> None:
    mixed = TlsSettings(certificate=pairs[0].certificate, key=pairs[1].key)
    missing = TlsSettings(certificate=tmp_path / "none.crt", key=pairs[0].key)
    for settings in (mixed, missing):
        with pytest.raises(UsageError, match=f"{settings.certificate} and {settings.key} cannot be used"):
            Certificate(settings, "picker.tls")


def test_half_of_a_new_pair_changes_nothing(
    pairs: list[TlsSettings], used: TlsSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.listening.certificate")
    certificate = Certificate(used, "picker.tls")
    assert not certificate.renew()
    assert not caplog.messages
    replace(used.certificate, pairs[1].certificate)
    assert not certificate.renew()
    assert not certificate.renew()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    replace(used.key, pairs[1].key)
    assert certificate.renew()
    assert caplog.messages[-1] == f"picker.tls: {used.certificate} has been read again"
    assert not certificate.renew()


async def test_a_renewed_certificate_is_shown_without_a_restart(pairs: list[TlsSettings], used: TlsSettings) -> None:
    async with listening({"picker": {"tls": used.model_dump()}}) as (_, _, address):

        async def serves(trusted: TlsSettings) -> bool:
            credentials = grpc.ssl_channel_credentials(trusted.certificate.read_bytes())
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.secure_channel(address, credentials, options) as channel:
                try:
                    answer = await HealthStub(channel).Check(HealthCheckRequest(service="liveness"), timeout=10)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                    return False
                return bool(answer.status == HealthCheckResponse.SERVING)

        assert await serves(pairs[0])
        assert not await serves(pairs[1])
        replace(used.certificate, pairs[1].certificate)
        replace(used.key, pairs[1].key)
        await eventually_async(lambda: serves(pairs[1]))
        assert not await serves(pairs[0])
