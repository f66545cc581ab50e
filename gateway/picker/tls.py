"""TLS of the picker's address."""

from __future__ import annotations

import grpc

from gateway.listening.certificate import Certificate


def credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Return the credentials of a server, which look for other files before each handshake."""

    def found() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([certificate.pem])

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        return found() if certificate.renew() else None

    return grpc.dynamic_ssl_server_credentials(found(), renewed)  # type: ignore[arg-type] # None keeps it
