"""A DNS server on loopback that answers from a table of records."""

from __future__ import annotations

import asyncio
from typing import Self, cast

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
from dns.asyncresolver import Resolver


class DnsServer(asyncio.DatagramProtocol):
    """A DNS server.

    Attributes
    ----------
    records
        Texts of the records by name and type: `{("vllm.example.", "A"): ["127.0.0.1"]}`. Other names do not exist.
    fails
        Whether it answers SERVFAIL.
    asked
        Number of queries so far.
    """

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.fails = False
        self.asked = 0
        self.port = 0
        self._transport: asyncio.DatagramTransport | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: self, ("127.0.0.1", 0))
        self._transport = transport
        self.port = transport.get_extra_info("sockname")[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._transport is not None
        self._transport.close()

    def resolver(self) -> Resolver:
        """Return a resolver that asks this server only."""
        resolver = Resolver(configure=False)
        resolver.nameservers, resolver.port = ["127.0.0.1"], self.port
        return resolver

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        self.asked += 1
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        question = query.question[0]
        name, kind = question.name.to_text(), question.rdtype.name
        if self.fails:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif texts := self.records.get((name, kind)):
            answer.answer.append(dns.rrset.from_text_list(question.name, 1, "IN", kind, texts))
        elif all(known != name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        transport = cast("asyncio.DatagramTransport", self._transport)
        transport.sendto(answer.to_wire(), addr)
