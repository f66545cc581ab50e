"""TLS of the picker's address."""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING

import grpc

from backends.validation import UsageError
from gateway.reload.watch import stamp_of

if TYPE_CHECKING:
    from gateway.config.settings import PickerTlsSettings

log = logging.getLogger(__name__)


class Certificate:
    """The certificate that new connections are shown; its files may be replaced at any time, as by cert-manager."""

    def __init__(self, tls: PickerTlsSettings) -> None:
        self._tls = tls
        self._seen = self._state()
        self._first = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a server, which look for other files before each handshake."""
        return grpc.dynamic_ssl_server_credentials(self._first, self.renewed)  # type: ignore[arg-type] # None keeps it

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what the files have now; None if they are as before, or cannot be used, which is said once."""
        seen = self._state()
        if seen == self._seen:
            return None
        try:
            found = self._read()
        except UsageError as error:
            self._seen = seen
            log.warning("%s; the one before stays in use", error)
            return None
        if self._state() != seen:  # replaced meanwhile: the next connection finds the pair
            return None
        self._seen = seen
        log.info("picker.tls: %s has been read again", self._tls.certificate)
        return found

    def _read(self) -> grpc.ServerCertificateConfiguration:
        certificate, key = self._tls.certificate, self._tls.key
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)  # gRPC does not say what is wrong
            return grpc.ssl_server_certificate_configuration([(key.read_bytes(), certificate.read_bytes())])
        except OSError as error:  # those of ssl are some
            reason = error.strerror or error
            raise UsageError(
                f"picker.tls: {certificate} and {key} cannot be used ({reason}); expected a chain of "
                "certificates and its private key, in PEM"
            ) from None

    def _state(self) -> list[object]:
        return [stamp_of(path) for path in (self._tls.certificate, self._tls.key)]
