"""A store in Redis, for gateways on several hosts.

Each entry is a string, its stamp followed by its value, that expires with the entry; a hash holds all stamps. Keys have
a prefix, so that several pools can share one Redis.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping

from redis import exceptions

from backends import background
from gateway.state.ledger import SKEW_S
from gateway.state.redis_client import RedisConnection
from gateway.state.store import Entry

log = logging.getLogger(__name__)


class RedisStore:
    """A `Store` in Redis."""

    kind = "redis"

    def __init__(self, url: str, prefix: str) -> None:
        self._connection = RedisConnection(url)
        self.location = self._connection.location
        self._prefix = prefix  # of all its keys
        self._index = f"{self._prefix}:index"
        self._is_skew_told = False

    def stamps(self) -> dict[str, str]:
        """See `Store.stamps`."""
        with self._connection.translate_errors():
            client = self._connection.client
            now_s, _ = client.time()  # by which Redis drops the entries: clocks of gateways differ
            fields = dict[str, tuple[str, float]]()
            for name, value in client.hgetall(self._index).items():
                with background.guarded("state", of=f"{self._index} {name!r}"):
                    stamp, end_s = value.decode().split()
                    fields[name.decode()] = stamp, float(end_s)
            expired = [name for name, (_, end_s) in fields.items() if 0.0 < end_s <= now_s]
            if expired:
                client.hdel(self._index, *expired)
        self._tell_skew(time.time() - now_s)
        return {name: stamp for name, (stamp, _) in fields.items() if name not in expired}

    def read(self, names: Collection[str]) -> dict[str, Entry]:
        """See `Store.read`."""
        with self._connection.translate_errors():
            values = self._connection.client.mget([self._key(name) for name in names]) if names else []
        return {name: _entry(value) for name, value in zip(names, values, strict=True) if value is not None}

    def commit(self, expected: Mapping[str, str], changes: Mapping[str, Entry | None]) -> bool:
        """See `Store.commit`."""
        keys = [self._key(name) for name in expected]
        with self._connection.translate_errors(), self._connection.client.pipeline() as pipeline:
            if keys:
                pipeline.watch(*keys)
                held = [_entry(value or b" ").stamp for value in pipeline.mget(keys)]
                if held != [*expected.values()]:
                    return False
            pipeline.multi()
            for name, entry in changes.items():
                key = self._key(name)
                if entry is None:
                    pipeline.delete(key)
                    pipeline.hdel(self._index, name)
                    continue
                pipeline.set(key, entry.stamp.encode() + b" " + entry.value)
                if entry.end_s:
                    pipeline.expireat(key, math.ceil(entry.end_s))
                if entry.stamp:
                    pipeline.hset(self._index, name, f"{entry.stamp} {entry.end_s!r}")
            try:
                pipeline.execute()
            except exceptions.WatchError as error:
                if error.__context__ is not None:  # the connection was lost
                    raise
                return False
        return True

    def close(self) -> None:
        """See `Store.close`."""
        self._connection.client.close()

    def _tell_skew(self, skew_s: float) -> None:
        is_skewed = abs(skew_s) > SKEW_S
        if is_skewed and not self._is_skew_told:
            text = (
                "the clock of this host is %.0f s %s that of %s: what is learned here expires at the wrong time, and "
                "other gateways may not read it; set the wrong one right"
            )
            log.warning(text, abs(skew_s), "ahead of" if skew_s > 0.0 else "behind", self.location)
        self._is_skew_told = is_skewed

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"


def _entry(text: bytes) -> Entry:
    stamp, _, value = text.partition(b" ")
    return Entry(stamp.decode("latin-1"), value)
