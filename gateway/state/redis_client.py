"""Connections to Redis: a single server, one that Sentinel names, or the node of a Cluster that has the pool's keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from redis import Redis, RedisCluster, Sentinel, exceptions
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.retry import Retry

from gateway.state.store import StateError

_CONNECT_S = 0.5
_ANSWER_S = 1.0
_SENTINEL_PORT = 26379
_REDIS_PORT = 6379
_EXPECTED = (
    "expected redis://host:port/database, rediss://... for TLS, unix:///path/to.sock, "
    "redis+sentinel://host:port,host:port/MASTER/database or redis+cluster://host:port,host:port"
)
_KINDS: tuple[tuple[type[Exception], str], ...] = (  # the first match counts
    (exceptions.TimeoutError, "timeout"),
    (exceptions.OutOfMemoryError, "full"),
    (exceptions.AuthenticationError, "refused"),
    (exceptions.ConnectionError, "unreachable"),
    (exceptions.ClusterError, "unreachable"),
    (exceptions.RedisError, "refused"),
    (OSError, "unreachable"),
)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed URL."""

    kind: str  # `server`, `sentinel` or `cluster`
    # The server, the sentinels, or some nodes of the cluster; empty for a Unix socket.
    hosts: tuple[tuple[str, int], ...]
    master: str  # name of the master that the sentinels watch
    options: dict[str, Any]  # arguments of the connections to Redis
    sentinel_options: dict[str, Any]  # arguments of the connections to the sentinels
    location: str  # the URL without user, password and options, for messages


def redis_address(url: str) -> RedisAddress:
    """Parse the URL of a Redis.

    Examples
    --------
    >>> address = redis_address("redis+sentinel://:secret@a,b:26380/mymaster/2")
    >>> address.hosts, address.master, address.options["db"], address.location
    ((('a', 26379), ('b', 26380)), 'mymaster', 2, 'redis+sentinel://a:26379,b:26380/mymaster/2')
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("not a URL") from None
    base, _, kind = parts.scheme.partition("+")
    if (base, kind) not in {
        ("redis", ""),
        ("rediss", ""),
        ("unix", ""),
        ("redis", "sentinel"),
        ("rediss", "sentinel"),
        ("redis", "cluster"),
        ("rediss", "cluster"),
    }:
        raise ValueError(_EXPECTED)
    if not kind:
        options = _options(parts, base)
        return RedisAddress("server", (), "", options, {}, _location(parts))
    credentials, _, hosts = parts.netloc.rpartition("@")
    places = tuple(_place(host, _SENTINEL_PORT if kind == "sentinel" else _REDIS_PORT) for host in hosts.split(","))
    master, database = "", parts.path.strip("/")
    if kind == "sentinel":
        master, _, database = database.partition("/")
        if not master:
            raise ValueError("needs the name of the master: redis+sentinel://host:26379,host:26379/MASTER/DATABASE")
    elif database not in {"", "0"}:
        raise ValueError("a Redis Cluster has no other database than 0")
    one = parts._replace(netloc=f"{credentials}@host" if credentials else "host", path=f"/{database}")
    options = _options(one, base)
    options.pop("host", None)
    sentinel_options = {
        name.removeprefix("sentinel_"): options.pop(name) for name in list(options) if name.startswith("sentinel_")
    }
    if base == "rediss":
        options["ssl"] = True
        sentinel_options |= {name: value for name, value in options.items() if name.startswith("ssl")}
    shown = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in places)
    location = f"{parts.scheme}://{shown}{parts.path}"
    return RedisAddress(kind, places, master, options, sentinel_options, location)


def _options(parts: SplitResult, base: str) -> dict[str, Any]:
    """Return the arguments of a connection, once it is sure that it takes them."""
    url = f"{base}://{parts.netloc}{parts.path}" + (f"?{parts.query}" if parts.query else "")
    path = parts.path.strip("/")
    options: dict[str, Any] | None
    try:
        options = parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError:  # its message may contain part of the password
        options = None
    if options is None or (base != "unix" and path and not path.isdecimal()):
        raise ValueError(_EXPECTED)
    options.pop("connection_class", None)
    connection = {"redis": Connection, "rediss": SSLConnection, "unix": UnixDomainSocketConnection}[base]
    known = {name: value for name, value in options.items() if not name.startswith("sentinel_")}
    try:
        connection(**known)
    except TypeError:
        raise ValueError("an option after `?` is not one of redis-py's connections") from None
    except exceptions.RedisError as error:
        raise ValueError(f"an option after `?` is not valid: {error}") from None
    return options


def _place(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or (port is None and text.rstrip("]").endswith(":")):
        raise ValueError("expected host:port,host:port,... after the `@`, if any")
    return host, default_port if port is None else port


def _location(parts: SplitResult) -> str:
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname or "localhost"
    return f"{parts.scheme}://{host}:{parts.port or _REDIS_PORT}{parts.path}"


def without_credentials(url: str) -> str:
    """Return a Redis URL without user, password and options.

    Examples
    --------
    >>> without_credentials("redis://user:secret@cache/2")
    'redis://cache:6379/2'
    """
    return redis_address(url).location


class RedisConnection:
    """A connection to the Redis that holds the keys of a pool, used by one thread at a time.

    In a Cluster all of these have one hash tag, so one node holds them, and all commands go to that node.
    """

    def __init__(self, url: str, prefix: str) -> None:
        self._address = redis_address(url)
        self.location = self._address.location
        is_cluster = self._address.kind == "cluster"
        # The prefix, in braces in a Cluster unless it contains some.
        # Prefix of the pool's keys.
        self.prefix = f"{{{prefix}}}" if is_cluster and not ("{" in prefix and "}" in prefix) else prefix
        self._url = url  # as `redis_address` takes
        self._cluster: Any = None
        self._client: Any = None

    def client(self) -> Any:
        """Return the client of the server that holds the keys."""
        if self._client is None:
            self._client = self._opened()
        if self._cluster is not None:
            return self._node()
        return self._client

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Raise `StateError` for the errors of Redis, and find out anew where the keys are."""
        try:
            yield
        except ValueError as error:
            raise StateError("foreign", f"{self.location}: not written by the gateway: {error}") from None
        except (exceptions.RedisError, OSError) as error:
            if self._address.kind == "cluster":  # the slot or the node may have moved
                self.close()
            cause = error.__context__ if isinstance(error, exceptions.WatchError) and error.__context__ else error
            kind = next((kind for error_type, kind in _KINDS if isinstance(cause, error_type)), "refused")
            raise StateError(kind, f"{self.location}: {cause}") from error

    def close(self) -> None:
        """Close the connections; the next call of `client` opens new ones."""
        client, self._client, self._cluster = self._client, None, None
        if client is not None:
            client.close()

    def _opened(self) -> Any:
        common: dict[str, Any] = {
            "socket_connect_timeout": _CONNECT_S,
            "socket_timeout": _ANSWER_S,
            "retry": Retry(NoBackoff(), 0),  # the caller retries, and handles replies that were lost
        }
        named = common | {"client_name": "speculation-gateway", "protocol": 2}
        address = self._address
        if address.kind == "sentinel":
            sentinels: Any = Sentinel(  # type: ignore[no-untyped-call]
                address.hosts, sentinel_kwargs=common | address.sentinel_options, **(named | address.options)
            )
            return sentinels.master_for(address.master)
        if address.kind == "cluster":
            nodes: Any = [ClusterNode(host, port) for host, port in address.hosts]  # type: ignore[no-untyped-call]
            self._cluster = RedisCluster(startup_nodes=nodes, **(named | address.options))
            return self._cluster
        return Redis.from_url(self._url, single_connection_client=False, **named)

    def _node(self) -> Any:
        node = self._cluster.get_node_from_key(f"{self.prefix}:index")
        if node is None:
            raise exceptions.ClusterDownError(f"no node has the slot of {self.prefix}")
        return self._cluster.get_redis_connection(node)
