"""Which gateway runs a batch: the one that holds its lease."""

from __future__ import annotations

import os
import time
from typing import Final

from gateway.batches.storage import Storage

LEASE_S: Final = 10.0
"""Seconds after which a gateway that no longer renews its lease is taken for dead."""
_SETTLE_S: Final = 0.3
"""Seconds after which it is seen which of two gateways has taken a lease that both found free."""


class Lease:
    """The lease of a batch, which one gateway holds at a time if clocks agree to some seconds.

    Two hold it at most for as long as one of them is held up between reading and writing it, or is stopped for longer
    than the lease lasts and has not seen yet that it is another's.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self._path = path
        self.holder = os.urandom(8).hex()  # who this is

    def take(self) -> bool:
        """Take the lease if it is free; of two that do so at once, the last one holds it."""
        lease = self._storage.read(self._path)
        if lease is not None and lease["until"] > time.time():
            return False
        self._write()
        time.sleep(_SETTLE_S)
        return self._is_held()

    def renew(self) -> bool:
        """Hold the lease for longer; return False if it is another's."""
        if not self._is_held():
            return False
        self._write()
        return True

    def release(self) -> None:
        """Give it back."""
        if self._is_held():
            self._storage.remove(self._path)

    def _is_held(self) -> bool:
        lease = self._storage.read(self._path)
        return lease is not None and lease["by"] == self.holder

    def _write(self) -> None:
        self._storage.write_json(self._path, {"by": self.holder, "until": time.time() + LEASE_S})
