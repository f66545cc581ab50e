"""The certificate of an address; its files may be replaced at any time, as by cert-manager."""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from backends.files.regular import read_file
from backends.validation import UsageError
from gateway.config.settings import TlsSettings

log = logging.getLogger(__name__)

PATIENCE_S: Final = 0.05
"""Seconds that a new connection waits for the files; a mount that hangs may take forever."""
_MOST_BYTES: Final = 1 << 20


class Certificate:
    """A certificate and its key.

    Attributes
    ----------
    context
        TLS context for new connections.
    pem
        The key and the chain, as read from the files.
    """

    def __init__(self, tls: TlsSettings, section: str) -> None:
        self._tls = tls
        self._section = section  # of the pool file
        self._problem = ""  # of the current files; empty without one
        self._looking: Future[bool] | None = None
        self._looked_s = 0.0
        self.pem = self._read()
        self.context = self._context(self.pem)

    def look(self) -> Future[bool] | None:
        """Start looking for replaced files; return a future to wait for briefly, or None if the disk hangs."""
        now_s = time.monotonic()
        if self._looking is None or self._looking.done():
            thread = ThreadPoolExecutor(1, "certificate")
            self._looking, self._looked_s = thread.submit(self.renew), now_s
            thread.shutdown(wait=False)
        return self._looking if now_s < self._looked_s + PATIENCE_S else None

    def renew(self) -> bool:
        """Use the files if they were replaced; return False if not, or if they are unusable, which is logged once."""
        try:
            pem = self._read()
            context = self.context if pem == self.pem else self._context(pem)
        except UsageError as error:
            if str(error) != self._problem:
                log.warning("%s; the one before stays in use", error)
            self._problem = str(error)
            return False
        self._problem = ""
        if pem == self.pem:
            return False
        self.context, self.pem = context, pem
        log.info("%s: %s has been read again", self._section, self._tls.certificate)
        return True

    def _read(self) -> tuple[bytes, bytes]:
        try:
            return read_file(self._tls.key, _MOST_BYTES), read_file(self._tls.certificate, _MOST_BYTES)
        except OSError as error:
            raise self._unusable(f"{error.filename}: {error.strerror}") from None

    def _context(self, pem: tuple[bytes, bytes]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 and 1.3
        context.set_alpn_protocols(["http/1.1"])
        with _in_memory(pem[0]) as key, _in_memory(pem[1]) as chain:
            try:
                context.load_cert_chain(chain, key, password="")
            except OSError as error:  # includes ssl.SSLError
                raise self._unusable(error.strerror or str(error)) from None
        return context

    def _unusable(self, reason: str) -> UsageError:
        return UsageError(
            f"{self._section}: {self._tls.certificate} and {self._tls.key} cannot be used ({reason}); expected a chain "
            "of certificates and its private key, in PEM"
        )


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """Yield the path of an in-memory file, since OpenSSL reads only from files."""
    with open(os.memfd_create("pem"), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
