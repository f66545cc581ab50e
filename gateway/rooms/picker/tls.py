"""TLS of the picker's address."""

from __future__ import annotations

from concurrent.futures import wait

import grpc

from gateway.listening.certificate import PATIENCE_S, Certificate


def credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Return the credentials of a server, which look for other files before each handshake."""
    shown = certificate.pem

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        if (looking := certificate.look()) is not None:
            wait([looking], timeout=PATIENCE_S)
        if shown is certificate.pem:
            return None
        shown = certificate.pem
        return grpc.ssl_server_certificate_configuration([shown])

    first = grpc.ssl_server_certificate_configuration([shown])
    return grpc.dynamic_ssl_server_credentials(first, renewed)  # type: ignore[arg-type] # None keeps it
