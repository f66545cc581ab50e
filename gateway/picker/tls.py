"""TLS of the picker's address."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from backends.validation import UsageError

if TYPE_CHECKING:
    from gateway.config.settings import PickerTlsSettings


def context_of(tls: PickerTlsSettings) -> ssl.SSLContext:
    """Return the context of a server that speaks HTTP/2.

    Raises
    ------
    UsageError
        If a file cannot be read, or certificate and key do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except OSError as error:  # those of ssl are some
        reason = error.strerror or error
        raise UsageError(
            f"picker.tls: {tls.certificate} and {tls.key} cannot be used ({reason}); expected a chain of certificates "
            "and its private key, in PEM"
        ) from None
    return context
