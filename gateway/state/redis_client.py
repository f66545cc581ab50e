"""The connection to a Redis server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from redis import ConnectionPool, Redis, exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from gateway.state.store import StateError

_CONNECT_S = 0.5
_ANSWER_S = 1.0
_EXPECTED = "expected redis://host:port/database, rediss://... for TLS, or unix:///path/to.sock"
_KINDS: tuple[tuple[type[Exception], str], ...] = (  # the first match wins
    (exceptions.TimeoutError, "timeout"),
    (exceptions.OutOfMemoryError, "full"),
    (exceptions.AuthenticationError, "refused"),
    (exceptions.ConnectionError, "unreachable"),
    (exceptions.RedisError, "refused"),
    (OSError, "unreachable"),
)


def without_credentials(url: str) -> str:
    """Return a Redis URL without user, password and options, if redis-py accepts it.

    Examples
    --------
    >>> without_credentials("redis://user:secret@cache/2")
    'redis://cache:6379/2'
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 6379
        ConnectionPool.from_url(url).make_connection()
    except TypeError:
        raise ValueError("an option after `?` is not one of redis-py's connections") from None
    except exceptions.RedisError as error:
        raise ValueError(f"an option after `?` is not valid: {error}") from None
    except ValueError:  # its message may contain part of the password
        is_several = url.partition(":")[0].endswith(("+sentinel", "+cluster"))
        raise ValueError(("Sentinel and Cluster are not supported: " if is_several else "") + _EXPECTED) from None
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    if parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        raise ValueError(_EXPECTED)
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname or "localhost"
    return f"{parts.scheme}://{host}:{port}{parts.path}"


class RedisConnection:
    """A connection to the Redis that holds the keys of a pool, used by one thread at a time."""

    def __init__(self, url: str) -> None:
        self.location = without_credentials(url)
        self.client: Any = Redis.from_url(
            url,
            socket_connect_timeout=_CONNECT_S,
            socket_timeout=_ANSWER_S,
            retry=Retry(NoBackoff(), 0),  # the caller retries, and handles lost replies
            client_name="speculation-gateway",
            protocol=2,
        )

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Translate errors of Redis to `StateError`."""
        try:
            yield
        except ValueError as error:
            raise StateError("foreign", f"{self.location}: not written by the gateway: {error}") from None
        except (exceptions.RedisError, OSError) as error:
            self.client.connection_pool.disconnect()  # after a failover, a new connection reaches another server
            cause = error.__context__ if isinstance(error, exceptions.WatchError) and error.__context__ else error
            kind = next((kind for error_type, kind in _KINDS if isinstance(cause, error_type)), "refused")
            raise StateError(kind, f"{self.location}: {cause}") from error
