"""A store in Redis, for gateways on several hosts.

Each entry is a string, its stamp before the value, which expires with it; a hash holds the stamps of all. Keys have a
prefix, so that several pools can share one Redis.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from redis import Redis, exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from gateway.state.store import Entry, StateError

_CONNECT_S = 0.5
_ANSWER_S = 1.0
_KINDS: tuple[tuple[type[Exception], str], ...] = (  # the first match counts
    (exceptions.TimeoutError, "timeout"),
    (exceptions.OutOfMemoryError, "full"),
    (exceptions.AuthenticationError, "refused"),
    (exceptions.ConnectionError, "unreachable"),
    (exceptions.RedisError, "refused"),
    (OSError, "unreachable"),
)


class RedisStore:
    """A `Store` in Redis.

    Parameters
    ----------
    url
        `redis://[user:password@]host[:port][/database]`, `rediss://...` for TLS, or `unix:///path`.
    prefix
        Prefix of all its keys.

    Raises
    ------
    ValueError
        If the URL has none of these forms.
    """

    kind = "redis"

    def __init__(self, url: str, prefix: str) -> None:
        self.location = without_credentials(url)
        self._prefix = prefix
        self._index = f"{prefix}:index"
        self._client: Any = Redis.from_url(
            url,
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=_ANSWER_S,
            retry=Retry(NoBackoff(), 0),  # the caller retries, and handles replies that were lost
            protocol=2,
            single_connection_client=False,
            client_name="speculation-gateway",
        )

    def stamps(self) -> dict[str, str]:
        """See `Store.stamps`."""
        now_s = time.time()
        with self._translate_errors():
            fields = {name.decode(): value.split() for name, value in self._client.hgetall(self._index).items()}
            expired = [name for name, (_, end_s) in fields.items() if 0.0 < float(end_s) <= now_s]
            if expired:
                self._client.hdel(self._index, *expired)
        return {name: stamp.decode() for name, (stamp, end_s) in fields.items() if name not in expired}

    def read(self, names: Collection[str]) -> dict[str, Entry]:
        """See `Store.read`."""
        with self._translate_errors():
            values = self._client.mget([self._key(name) for name in names]) if names else []
        return {name: _entry(value) for name, value in zip(names, values, strict=True) if value is not None}

    def commit(self, expected: Mapping[str, str], changes: Mapping[str, Entry | None]) -> bool:
        """See `Store.commit`."""
        keys = [self._key(name) for name in expected]
        with self._translate_errors(), self._client.pipeline() as pipeline:
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
        self._client.close()

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise StateError("foreign", f"{self.location}: not written by the gateway: {error}") from None
        except (exceptions.RedisError, OSError) as error:
            cause = error.__context__ if isinstance(error, exceptions.WatchError) and error.__context__ else error
            kind = next((kind for error_type, kind in _KINDS if isinstance(cause, error_type)), "refused")
            raise StateError(kind, f"{self.location}: {cause}") from error


def without_credentials(url: str) -> str:
    """Return a Redis URL without user and password.

    Examples
    --------
    >>> without_credentials("redis://user:secret@cache/2")
    'redis://cache:6379/2'
    """
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname or "localhost"
    return f"{parts.scheme}://{host}:{parts.port or 6379}{parts.path}"


def _entry(text: bytes) -> Entry:
    stamp, _, value = text.partition(b" ")
    return Entry(stamp.decode(), value)
