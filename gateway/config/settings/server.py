"""The sections `server`, `timeouts` and `health`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from backends.health import HealthRules
from backends.validation import Issue
from gateway.config.settings.base import Count, Seconds, Settings
from gateway.http.server import ServerLimits

_LIMITS: Final = ServerLimits()
_RULES: Final = HealthRules()


class TlsSettings(Settings):
    """A server certificate and its key.

    Parameters
    ----------
    certificate
        File with the chain of certificates, in PEM.
    key
        File with the private key, in PEM.
    """

    certificate: Path
    key: Path


class ServerSettings(Settings):
    """Address, processes and limits of the gateway.

    Parameters
    ----------
    host
        Address to listen on.
    port
        Port to listen on; 0 picks a free one.
    workers
        Number of worker processes, all listening on the same port.
    reuse_port
        Whether another gateway of this user may listen on the same port, so that a new version takes over:
        docs/upgrade.md.
    tls
        TLS, for clients and at `admin.listen`. Replaced files are read again.
    drain_s
        Seconds that requests in flight may still run after SIGTERM.
    max_body_mib
        Largest request body, in MiB; a larger one is answered with 413.
    max_body_values
        Most that the JSON values of a body may add up to; more is answered with 413. An element counts 1, a string 2, a
        member of an object 2, an array or object 16; the content of strings counts nothing.
    head_s
        Seconds from the first byte of a request to the end of its head; then 408. A new connection has as long for that
        byte.
    body_s
        Seconds for the body of a request, from the end of its head; then 408.
    max_connections
        Most connections of clients, for each worker.
    max_unfinished_mib
        Most MiB of requests that are not complete yet, over all connections of a worker. Above it, the request that
        holds the most is answered with 503.
    max_in_flight
        Most requests in flight at once, over all models and workers; further ones are answered with 503. Null sets no
        limit.
    watch
        Whether the pool file is reloaded when it has changed; else on SIGHUP and `POST /admin/reload` only.

    Examples
    --------
    >>> ServerSettings(port=0).host
    '127.0.0.1'
    """

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    workers: Count = 1
    reuse_port: bool = False
    tls: TlsSettings | None = None
    drain_s: Annotated[float, Field(ge=0)] = 30.0
    max_body_mib: Annotated[float, Field(gt=0)] = _LIMITS.body_bytes / 2**20
    max_body_values: Count = 1_500_000
    head_s: Seconds = _LIMITS.head_s
    body_s: Seconds = _LIMITS.body_s
    max_connections: Count = _LIMITS.connections
    max_unfinished_mib: Annotated[float, Field(gt=0)] = _LIMITS.unfinished_bytes / 2**20
    max_in_flight: Count | None = None
    watch: bool = False

    @property
    def scheme(self) -> str:
        """Scheme of the gateway's URLs."""
        return "http" if self.tls is None else "https"

    @property
    def max_body_bytes(self) -> int:
        """The bound on a body, in bytes."""
        return int(self.max_body_mib * 2**20)

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an issue if one body may exceed `max_unfinished_mib`."""
        body_mib, unfinished_mib = (
            data.get(key, cls.model_fields[key].default) for key in ("max_body_mib", "max_unfinished_mib")
        )
        if isinstance(body_mib, int | float) and isinstance(unfinished_mib, int | float) and body_mib > unfinished_mib:
            yield Issue(("max_unfinished_mib",), f"less than max_body_mib, {body_mib}")


class TimeoutSettings(Settings):
    """Timeouts of a request.

    Parameters
    ----------
    connect_s
        Seconds to connect.
    first_byte_s
        Seconds from the end of the request to the first byte of the response; without streaming, to all of it.
    idle_s
        Seconds between two parts of a response.
    total_s
        Seconds from the end of the request to the end of the response. The header `x-request-timeout` of a request
        can only shorten it.
    keep_alive_s
        Seconds that an idle connection to a backend is kept: fewer than a balancer in between keeps it.
    """

    connect_s: Seconds = 2.0
    first_byte_s: Seconds = 600.0
    idle_s: Seconds = 60.0
    total_s: Seconds | None = None
    keep_alive_s: Seconds = 30.0


class HealthSettings(Settings):
    """Health checks, and ejection of backends that fail what others serve.

    Parameters
    ----------
    interval_s
        Seconds between two checks of a backend.
    timeout_s
        Seconds after which a check counts as failed.
    eject_s
        Seconds for which a backend is ejected after it failed three different requests in a row, by its own fault.
    eject_max_s
        Longest ejection, in seconds; a backend that is ejected again within this time of its return stays out twice as
        long.
    slow_start_s
        Seconds over which a returning backend's share grows to that of the others; 0: immediately.
    """

    interval_s: Seconds = _RULES.interval_s
    timeout_s: Seconds = _RULES.timeout_s
    eject_s: Seconds = _RULES.eject_s
    eject_max_s: Seconds = _RULES.eject_max_s
    slow_start_s: Annotated[float, Field(ge=0)] = _RULES.slow_start_s

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an issue if the first ejection is longer than the longest."""
        first_s, longest_s = data.get("eject_s", _RULES.eject_s), data.get("eject_max_s", _RULES.eject_max_s)
        if isinstance(first_s, int | float) and isinstance(longest_s, int | float) and first_s > longest_s:
            yield Issue(("eject_s",), f"greater than eject_max_s, {longest_s}")
