"""The certificate that an address shows; its files may be replaced at any time, as by cert-manager."""

from __future__ import annotations

import logging
import ssl

from backends.validation import UsageError
from gateway.config.settings import TlsSettings
from gateway.reload.watch import stamp_of

log = logging.getLogger(__name__)


class Certificate:
    """A certificate and its key.

    Attributes
    ----------
    context
        What new connections are accepted with.
    pem
        The key and the chain, as the files have them.
    """

    def __init__(self, tls: TlsSettings, section: str) -> None:
        self._tls = tls
        self._section = section  # of the pool file
        self._seen = self._state()
        self.context, self.pem = self._read()

    def renew(self) -> bool:
        """Read the files if they have changed; return False if they have not, or cannot be used, which is said once."""
        seen = self._state()
        if seen == self._seen:
            return False
        try:
            found = self._read()
        except UsageError as error:
            self._seen = seen
            log.warning("%s; the one before stays in use", error)
            return False
        if self._state() != seen:  # replaced meanwhile: the next connection finds the pair
            return False
        self._seen = seen
        self.context, self.pem = found
        log.info("%s: %s has been read again", self._section, self._tls.certificate)
        return True

    def _read(self) -> tuple[ssl.SSLContext, tuple[bytes, bytes]]:
        certificate, key = self._tls.certificate, self._tls.key
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # of TLS 1.2 and 1.3
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(certificate, key, password="")
            return context, (key.read_bytes(), certificate.read_bytes())
        except OSError as error:  # those of ssl are some
            reason = error.strerror or error
            raise UsageError(
                f"{self._section}: {certificate} and {key} cannot be used ({reason}); expected a chain of "
                "certificates and its private key, in PEM"
            ) from None

    def _state(self) -> list[object]:
        return [stamp_of(path) for path in (self._tls.certificate, self._tls.key)]
