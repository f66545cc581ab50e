"""The certificate of the picker's address."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from backends.validation import UsageError
from gateway.config.settings import PickerTlsSettings
from gateway.picker.tls import context_of


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[PickerTlsSettings]:
    folder = tmp_path_factory.mktemp("tls")
    made = []
    for number in range(2):
        settings = PickerTlsSettings(certificate=folder / f"{number}.crt", key=folder / f"{number}.key")
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
        files = ["-keyout", settings.key, "-out", settings.certificate]
        subprocess.run([*command.split(), *files], check=True, capture_output=True)
        made.append(settings)
    return made


def test_a_pair_makes_a_context_of_http_2(pairs: list[PickerTlsSettings]) -> None:
    assert isinstance(context_of(pairs[0]), ssl.SSLContext)


def test_files_that_cannot_be_used_are_named(pairs: list[PickerTlsSettings], tmp_path: Path) -> None:
    mixed = PickerTlsSettings(certificate=pairs[0].certificate, key=pairs[1].key)
    missing = PickerTlsSettings(certificate=tmp_path / "none.crt", key=pairs[0].key)
    for settings in (mixed, missing):
        with pytest.raises(UsageError, match=f"{settings.certificate} and {settings.key} cannot be used"):
            context_of(settings)
