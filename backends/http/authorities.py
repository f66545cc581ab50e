"""Certificate authorities for connections to `https` addresses."""

from __future__ import annotations

import contextlib
import functools
import os
import ssl
from concurrent.futures import Future, ThreadPoolExecutor
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
    """Trust also those in the file as it is now; those before stay trusted."""
    if (file := ssl.get_default_verify_paths().cafile) is not None:
        with contextlib.suppress(OSError):
            found = os.stat(file)
            _read(found.st_ino, found.st_mtime_ns)


@functools.lru_cache(1)
def _read(_inode: int, _changed_ns: int) -> None:
    trusted().set_default_verify_paths()


class Renewals:
    """Renews the authorities, each time in a thread that ends with it; one at a time, as the file may never answer."""

    def __init__(self) -> None:
        self._latest: Future[None] | None = None

    def begin(self) -> Future[None]:
        """Return the renewal that is under way, or begin one."""
        if self._latest is None or self._latest.done():
            thread = ThreadPoolExecutor(1, "authorities")
            self._latest = thread.submit(renew)
            thread.shutdown(wait=False)
        return self._latest


renewals: Final = Renewals()
