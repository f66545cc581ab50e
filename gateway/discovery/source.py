"""What a source of replicas is: it reports the replicas that there are, again and again."""

from __future__ import annotations

from collections.abc import Callable, Collection
from ipaddress import ip_address
from typing import Literal, NamedTuple, Protocol

from backends.http.address import host_and_port
from gateway.config.settings import BackendSettings

MOST_REPLICAS = 1000
"""Replicas of one source; further ones are left out."""


class Replica(NamedTuple):
    """A replica that a source has found."""

    # Its name within the source, such as `10.0.0.7:8000`, which stays the same as long as it is the same replica.
    name: str
    url: str  # its address
    # How it speculates, if it tells that itself; None if the settings of the source do.
    own: BackendSettings | None = None


class SourceError(Exception):
    """Raised if a source cannot be asked; the message says why, without secrets."""


Outcome = Literal["found", "nothing", "failed"]
Report = Callable[[Collection[Replica]], None]


class ReplicaSource(Protocol):
    """A source of replicas."""

    async def follow(self, report: Report) -> None:
        """Report all replicas, now and after each change, until the source ends; to be called again then."""


def replica_at(address: str, port: int) -> Replica:
    """Return the replica at an IP address; raise `ValueError` for what is none.

    Examples
    --------
    >>> replica_at("fd00::7", 8000)[:2]
    ('fd00::7:8000', 'http://[fd00::7]:8000')
    """
    return Replica(f"{address}:{port}", f"http://{host_and_port(str(ip_address(address)), port)}")
