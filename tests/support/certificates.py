"""Certificates, each signed by itself, and their files being replaced."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from gateway.config.settings import TlsSettings


def make_pair(path: Path, name: str = "localhost") -> TlsSettings:
    """Make a certificate and its key, beside a path; it is also for 127.0.0.1."""
    made = TlsSettings(certificate=path.with_suffix(".crt"), key=path.with_suffix(".key"))
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
    names = ["-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1"]
    files = ["-keyout", str(made.key), "-out", str(made.certificate)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    return made


def copied(pair: TlsSettings, folder: Path) -> TlsSettings:
    """Return a copy whose files may be replaced."""
    made = TlsSettings(certificate=folder / "tls.crt", key=folder / "tls.key")
    replace(made.certificate, pair.certificate)
    replace(made.key, pair.key)
    return made


def replace(file: Path, by: Path) -> None:
    """Replace a file as a whole, as kubelets do."""
    os.replace(shutil.copy(by, file.with_suffix(".new")), file)
