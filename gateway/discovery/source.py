"""The interface of a source of replicas, which reports the current replicas again and again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from ipaddress import ip_address
from typing import Literal, NamedTuple, Protocol

from backends.http.address import host_and_port
from gateway.config.settings import BackendSettings

MOST_REPLICAS = 1000
"""Per source; further ones are left out."""


class Replica(NamedTuple):
    """A replica that a source has found."""

    # Its name within the source, such as `10.0.0.7:8000`; stable for the life of the replica.
    name: str
    url: str  # its address
    # How it speculates, if it says so itself; None if the settings of the source say it.
    own: BackendSettings | None = None


class SourceError(Exception):
    """Raised if a source cannot be queried; the message says why, without secrets."""


Outcome = Literal["found", "nothing", "failed"]
Report = Callable[[Collection[Replica]], None]


class ReplicaSource(Protocol):
    """A source of replicas."""

    async def follow(self, report: Report) -> None:
        """Report all replicas, now and after each change, until the source ends; then call it again."""


def replica_at(address: str, port: int) -> Replica:
    """Return the replica at an IP address; raise `ValueError` for anything else.

    Examples
    --------
    >>> replica_at("fd00::7", 8000)[:2]
    ('fd00::7:8000', 'http://[fd00::7]:8000')
    """
    return Replica(f"{address}:{port}", f"http://{host_and_port(str(ip_address(address)), port)}")
