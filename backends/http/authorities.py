"""Certificate authorities for connections to `https` addresses."""

from __future__ import annotations

import contextlib
import functools
import os
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

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


def renew() -> None:
    """Trust also those in the file as it is now, in one of `threads`; those before stay trusted."""
    if (file := ssl.get_default_verify_paths().cafile) is not None:
        with contextlib.suppress(OSError):
            found = os.stat(file)
            _read(found.st_ino, found.st_mtime_ns)


@functools.lru_cache(1)
def _read(_inode: int, _changed_ns: int) -> None:
    trusted().set_default_verify_paths()


threads: Final = ThreadPoolExecutor(1, "authorities")
"""For files that may never answer."""
