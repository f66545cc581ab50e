"""Certificate authorities for connections to `https` addresses."""

from __future__ import annotations

import functools
import os
import ssl
from pathlib import Path

from backends.files.regular import check_regular
from backends.validation import UsageError


@functools.cache
def trusted() -> ssl.SSLContext:
    """Return the authorities of the system or of `SSL_CERT_FILE`, read once, as that takes 17 ms."""
    if file := os.environ.get("SSL_CERT_FILE"):
        try:
            check_regular(Path(file), os.stat(file))
        except OSError as error:
            raise UsageError(f"SSL_CERT_FILE: {file}: {error.strerror}") from None
    return ssl.create_default_context()
