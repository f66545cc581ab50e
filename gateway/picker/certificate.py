"""The certificate of the picker's gRPC server."""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING

from gateway.config.settings.picker import PickerTlsSettings

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)


def read_pair(tls: PickerTlsSettings) -> tuple[bytes, bytes]:
    """Return the private key and the certificate.

    Raises
    ------
    OSError
        If a file cannot be read, or if they do not belong together.
    """
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certificate, tls.key)
    return tls.key.read_bytes(), tls.certificate.read_bytes()


def credentials(tls: PickerTlsSettings) -> grpc.ServerCredentials:
    """Return what a gRPC server shows: at each new connection the certificate that the files hold by then."""
    import grpc

    shown = read_pair(tls)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        try:
            found = read_pair(tls)
        except OSError as error:  # as while one file is new and the other is not
            log.warning("picker.tls: the certificate shown before is kept: %s", error)
            return None
        if found == shown:
            return None
        shown = found
        return grpc.ssl_server_certificate_configuration([found])

    first = grpc.ssl_server_certificate_configuration([shown])
    return grpc.dynamic_ssl_server_credentials(first, renewed)
