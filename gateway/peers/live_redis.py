"""Exchanges reports through Redis: one hash, with a field for each process."""

from __future__ import annotations

from collections.abc import Collection

from gateway.state.redis_client import RedisConnection

_EXPIRE_S = 120
"""The hash outlives its last writer by this many seconds."""


class LiveRedis:
    """Reports of the processes of all gateways of a pool."""

    def __init__(self, url: str, prefix: str, writer: str) -> None:
        self._connection = RedisConnection(url)
        self.location = self._connection.location
        self._key = f"{prefix}:live"
        self._writer = writer.encode()  # unique name of this process
        self._last: dict[bytes, bytes] = {}

    def exchange(self, report: bytes, gone: Collection[str]) -> list[bytes]:
        """See `Live.exchange`."""
        with self._connection.translate_errors(), self._connection.client.pipeline(transaction=False) as pipeline:
            if report:
                pipeline.hset(self._key, self._writer, report)
                pipeline.expire(self._key, _EXPIRE_S)
            if gone:
                pipeline.hdel(self._key, *gone)
            pipeline.hgetall(self._key)
            found: dict[bytes, bytes] = pipeline.execute()[-1]
        found.pop(self._writer, None)
        last, self._last = self._last, found
        return [data for writer, data in found.items() if last.get(writer) != data]

    def leave(self) -> None:
        """See `Live.leave`."""
        with self._connection.translate_errors():
            self._connection.client.hdel(self._key, self._writer)
        self._connection.client.close()
