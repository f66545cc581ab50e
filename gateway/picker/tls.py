"""TLS of the picker's address."""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING

from backends.validation import UsageError

if TYPE_CHECKING:
    from gateway.config.settings import PickerTlsSettings

log = logging.getLogger(__name__)


class Certificate:
    """The certificate that new connections are shown; its files may be replaced at any time, as by cert-manager."""

    def __init__(self, tls: PickerTlsSettings) -> None:
        self._tls = tls
        self._seen = self._state()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # the context of a server that speaks HTTP/2
        self.context.set_alpn_protocols(["h2"])
        self._load(self.context)

    def refresh(self) -> None:
        """Read the files again if they have changed; what cannot be used is left, and said once."""
        seen = self._state()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # half of a pair would spoil the context that is in use
            self._load(self.context)
        except UsageError as error:
            log.warning("%s; the one before stays in use", error)
        else:
            log.info("picker.tls: %s has been read again", self._tls.certificate)

    def _load(self, context: ssl.SSLContext) -> None:
        tls = self._tls
        try:
            context.load_cert_chain(tls.certificate, tls.key)
        except OSError as error:  # those of ssl are some
            reason = error.strerror or error
            raise UsageError(
                f"picker.tls: {tls.certificate} and {tls.key} cannot be used ({reason}); expected a chain of "
                "certificates and its private key, in PEM"
            ) from None

    def _state(self) -> list[tuple[int, int, int]]:
        """Return what is different once a file has been replaced."""
        state = []
        for path in (self._tls.certificate, self._tls.key):
            try:
                found = path.stat()
            except OSError:
                continue
            state.append((found.st_ino, found.st_mtime_ns, found.st_size))
        return state
