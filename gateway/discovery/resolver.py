"""Replicas from DNS: each address of a name, or each target of an SRV record."""

from __future__ import annotations

import asyncio
import time

from dns.asyncresolver import Resolver
from dns.exception import DNSException
from dns.rdatatype import RdataType
from dns.resolver import NXDOMAIN, Answer, NoAnswer

from gateway.discovery.source import Replica, Report, SourceError, replica_at

_SHORTEST_S, _LONGEST_S = 5.0, 60.0
"""Bounds on how long an answer is used, whatever its TTL."""
_LIFETIME_S = 5.0


class DnsSource:
    """The replicas behind a DNS name."""

    def __init__(self, name: str, port: int | None, resolver: Resolver | None = None) -> None:
        self._name = name  # the name: of addresses, or of SRV records if there is no port
        self._port = port  # port of all replicas; None: each SRV record's
        self._resolver = resolver  # none for the nameservers and search list of this machine

    async def follow(self, report: Report) -> None:
        """Report the replicas whenever the last answer has expired."""
        try:
            resolver = self._resolver if self._resolver is not None else await asyncio.to_thread(Resolver)
        except DNSException as error:  # no nameserver in /etc/resolv.conf
            raise SourceError(str(error)) from None
        while True:
            replicas, ttl_s = await (self._services(resolver) if self._port is None else self._addresses(resolver))
            report(replicas)
            await asyncio.sleep(max(_SHORTEST_S, min(_LONGEST_S, ttl_s)))

    async def _addresses(self, resolver: Resolver) -> tuple[list[Replica], float]:
        """Return the replicas at IPv4 addresses, or else at IPv6 ones: a host that has both is one replica."""
        assert self._port is not None
        for kind in (RdataType.A, RdataType.AAAA):
            if (answer := await self._ask(resolver, kind)) is not None:
                addresses = sorted({str(record.address) for record in answer})
                return [replica_at(address, self._port) for address in addresses], _ttl_s(answer)
        return [], 0.0

    async def _services(self, resolver: Resolver) -> tuple[list[Replica], float]:
        answer = await self._ask(resolver, RdataType.SRV)
        if answer is None:
            return [], 0.0
        records = [record for record in answer if str(record.target) != "."]  # "." says that there is no such service
        first = min((record.priority for record in records), default=0)  # the others are for when these fail
        found = [record for record in records if record.priority == first]
        places = sorted({(record.target.to_text(omit_final_dot=True), record.port) for record in found})
        return [Replica(f"{host}:{port}", f"http://{host}:{port}") for host, port in places], _ttl_s(answer)

    async def _ask(self, resolver: Resolver, kind: RdataType) -> Answer | None:
        """Return the records of a kind; None if there are none."""
        try:
            return await resolver.resolve(self._name, kind, lifetime=_LIFETIME_S, search=True)
        except (NXDOMAIN, NoAnswer):
            return None
        except (DNSException, OSError) as error:
            raise SourceError(f"{kind.name} {self._name}: {error}") from None


def _ttl_s(answer: Answer) -> float:
    """Return the seconds until an answer expires."""
    return answer.expiration - time.time()
