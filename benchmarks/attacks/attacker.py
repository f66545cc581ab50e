"""The attacks: `python -m benchmarks.attacks.attacker NAME PORT HOLD_S`, which prints what the system answered.

Each attack is a coroutine; `HOLD_S` is how long connections that do nothing are held. Numbers that the machine does not
allow are lowered to `most_connections()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import uvloop

from benchmarks.attacks.framing import CASES
from benchmarks.attacks.upstream import ENDLESS, GARBAGE, LONG
from benchmarks.overhead.systems import KEY

MIB = 1 << 20
_PATH = b"/v1/chat/completions"
_KEY = b"authorization: Bearer %b\r\n" % KEY.encode()
_HEAD = b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n" % _PATH
_TO_BATCHES = b"POST /v1/batches HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
_TO_FILES = b"POST /v1/files HTTP/1.1\r\nhost: a\r\ncontent-type: multipart/form-data; boundary=x\r\n"
_FLOOD_S = 5.0
_ANSWER_S = 10.0
"""Seconds that an answer is waited for."""


@dataclass
class Report:
    """What became of an attack.

    Parameters
    ----------
    answers
        How often each status came; `closed` for a connection closed without one, `silent` for none in time.
    opened, held
        Connections opened, and those still open after `held_s` seconds.
    smuggled
        Requests inside others that the replicas have seen.
    """

    answers: Counter[str] = field(default_factory=Counter)
    opened: int = 0
    held: int = 0
    held_s: float = 0.0
    smuggled: int = 0
    notes: list[str] = field(default_factory=list)


class Peer:
    """A connection to the system."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *parts: bytes) -> bool:
        """Send parts; return False once the system has closed the connection, or does not read for a while."""
        with contextlib.suppress(OSError, TimeoutError):
            for part in parts:
                self.writer.write(part)
                async with asyncio.timeout(_ANSWER_S):
                    await self.writer.drain()
            return not self.writer.transport.is_closing()
        return False

    async def status(self, wait_s: float = _ANSWER_S) -> str:
        """Return the status of the next answer."""
        try:
            async with asyncio.timeout(wait_s):
                line = await self.reader.readline()
        except TimeoutError:
            return "silent"
        except (OSError, ValueError):
            return "closed"
        return line.split(b" ")[1].decode("ascii", "replace") if line.startswith(b"HTTP/1.") else "closed"

    async def body(self) -> bytes | None:
        """Return the body of an answer whose status was read; None if it has no known length, or does not come."""
        length = -1
        with contextlib.suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_ANSWER_S):
                while (line := await self.reader.readline()).strip():
                    name, _, value = line.lower().partition(b":")
                    length = int(value) if name == b"content-length" else length
                return await self.reader.readexactly(length)
        return None

    def is_open(self) -> bool:
        """Return whether the system has not closed the connection."""
        ended: bool = self.reader._eof  # type: ignore[attr-defined] # at_eof() is false while an answer is unread
        return not (ended or self.writer.transport.is_closing())

    def close(self) -> None:
        """Close at once."""
        self.writer.transport.abort()


def most_connections() -> int:
    """Return how many connections the attacker, and a system with the same limit, can hold, with some to spare."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1000


async def connect(port: int, limit: int = 1 << 16) -> Peer | None:
    """Connect; None if the system does not accept."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            return Peer(*await asyncio.open_connection("127.0.0.1", port, limit=limit))
    except (OSError, TimeoutError):
        return None


async def connect_many(port: int, count: int, report: Report) -> list[Peer]:
    """Open connections, a few hundred at a time."""
    peers: list[Peer] = []
    count = min(count, most_connections())
    while report.opened < count:
        batch = await asyncio.gather(*[connect(port) for _ in range(min(250, count - report.opened))])
        report.opened += len(batch)
        peers += [peer for peer in batch if peer is not None]
    if len(peers) < count:
        report.notes.append(f"{count - len(peers)} not accepted")
    return peers


async def hold(peers: Iterable[Peer], report: Report, hold_s: float) -> None:
    """Hold connections that do nothing, and count those that the system has left open."""
    peers = list(peers)
    await asyncio.sleep(hold_s)
    report.held, report.held_s = sum(peer.is_open() for peer in peers), hold_s
    for peer in peers:
        peer.close()


Attack = Callable[[int, float, Report], Awaitable[None]]
"""Of a port, the seconds that connections are held, and what is reported."""


def _flood(head: bytes, piece: bytes, size: int) -> Attack:
    """Return an attack by a request with so many bytes after its head."""

    async def attack(port: int, hold_s: float, report: Report) -> None:
        peer = await connect(port)
        if peer is None:
            report.answers["closed"] += 1
            return
        report.opened += 1
        await peer.send(head)
        sent = len(head)
        while sent < size and await peer.send(piece):
            sent += len(piece)
            if peer.reader._buffer:  # type: ignore[attr-defined] # answered: no need to send the rest
                break
        report.answers[await peer.status()] += 1
        report.notes.append(f"{sent / MIB:.1f} MiB sent")
        peer.close()

    return attack


async def _repeat(port: int, report: Report, connections: int, request: bytes) -> None:
    """Send a request over and over on connections, each after the answer to the one before."""
    end_s = time.monotonic() + _FLOOD_S

    async def one() -> None:
        while time.monotonic() < end_s:
            peer = await connect(port)
            if peer is None:
                report.answers["closed"] += 1
                await asyncio.sleep(0.1)
                continue
            report.opened += 1
            while time.monotonic() < end_s and await peer.send(request):
                status = await peer.status()
                report.answers[status] += 1
                if not status.isdigit() or await peer.body() is None or not peer.is_open():
                    break
            peer.close()

    await asyncio.gather(*[one() for _ in range(connections)])


def _over_and_over(connections: int, request: bytes) -> Attack:
    """Return an attack by a request over and over."""
    return lambda port, _, report: _repeat(port, report, connections, request)


def _held(count: int, *parts: bytes) -> Attack:
    """Return an attack by connections on which nothing follows these parts."""

    async def attack(port: int, hold_s: float, report: Report) -> None:
        peers = await connect_many(port, count, report)
        await asyncio.gather(*[peer.send(*parts) for peer in peers])
        await hold(peers, report, hold_s)

    return attack


async def keyless(port: int, hold_s: float, report: Report) -> None:
    """Send requests without a key, and with a wrong one, as fast as 16 connections go."""
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    length = b"content-length: %d\r\n\r\n" % len(body)
    wrong = _HEAD + b"authorization: Bearer sk-wrong\r\n" + length + body
    await asyncio.gather(_repeat(port, report, 8, _HEAD + length + body), _repeat(port, report, 8, wrong))


_VALUES: tuple[bytes, ...] = (b"{}", b"[]", b"12345", b'"a"', b'{"a":1}')
_COUNTED: tuple[int, ...] = (82_000, 82_000, 1_400_000, 460_000, 66_000)
"""How many of each the gateway still takes, by `server.max_body_values`."""


def _values(value: bytes, count: int) -> bytes:
    return b'{"model":"m","messages":[%b%b]}' % ((value + b",") * (count - 1), value)


def _keys(count: int) -> bytes:
    return b'{"model":"m",%b}' % b",".join([b'"k%d":1' % number for number in range(count)])


def _post(body: bytes, begin: bytes = _HEAD) -> tuple[bytes, bytes]:
    return begin + _KEY + b"content-length: %d\r\n\r\n" % len(body), body


async def _at_once(port: int, report: Report, bodies: Iterable[bytes], begin: bytes = _HEAD) -> None:
    """Send each body again and again, each on a connection of its own."""
    end_s = time.monotonic() + _FLOOD_S

    async def one(head: bytes, body: bytes) -> None:
        while time.monotonic() < end_s:
            if (peer := await connect(port)) is not None:
                report.opened += 1
                await peer.send(head)
                for at in range(0, len(body), MIB):
                    if peer.reader._buffer or not await peer.send(body[at : at + MIB]):  # type: ignore[attr-defined]
                        break
                report.answers[await peer.status(60.0)] += 1
                peer.close()

    await asyncio.gather(*[one(*_post(body, begin)) for body in bodies])


def _line(number: int, value: bytes) -> bytes:
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"x":%b}' % value
    return b'{"custom_id":"%d","method":"POST","url":"%b","body":%b}\n' % (number, _PATH, body)


async def _ask(port: int, report: Report, begin: bytes, body: bytes) -> dict[str, object]:
    """Send a request, and return the document that answers it."""
    if (peer := await connect(port)) is None:
        return {}
    report.opened += 1
    await peer.send(*_post(body, begin))
    report.answers[await peer.status(60.0)] += 1
    with contextlib.suppress(ValueError):
        document: dict[str, object] = json.loads(await peer.body() or b"{}")
        return document
    return {}


async def nested_batch(port: int, hold_s: float, report: Report) -> None:
    """Send bodies of 31 MB of nested JSON to the paths of batches, four at once."""
    await _at_once(port, report, [_values(b"[]", 31 * MIB // 3)] * 4, begin=_TO_BATCHES)


async def nested_line(port: int, hold_s: float, report: Report) -> None:
    """Run batches of a line of 31 MB of nested JSON, of lines with as many values as one may have, and of deep ones."""
    kinds = (
        [_line(0, b"[" + b"[]," * (31 * MIB // 3) + b"[]]"), _line(1, b"1")],
        [_line(number, b"[" + b"[]," * 280_000 + b"[]]") for number in range(30)],
        [_line(number, b"[" * number + b"]" * number) for number in range(250, 1030, 10)],
    )
    for lines in kinds:
        part = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
        head = b'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        form = part + head + b"".join(lines) + b"\r\n--x--\r\n"
        file_id = (await _ask(port, report, _TO_FILES, form)).get("id")
        asked = {"input_file_id": file_id, "endpoint": _PATH.decode(), "completion_window": "24h"}
        await _ask(port, report, _TO_BATCHES, json.dumps(asked).encode())
    await asyncio.sleep(4 * _FLOOD_S)  # they run, one after another


async def small_values(port: int, hold_s: float, report: Report) -> None:
    """Send bodies of 63 MB, and of 31 MB, of small JSON values, four at once."""
    for size in (63 * MIB, 31 * MIB):
        kinds = [_values(value, size // (len(value) + 1)) for value in _VALUES[:3]]
        await _at_once(port, report, [*kinds, _keys(size // 13)])


async def most_values(port: int, hold_s: float, report: Report) -> None:
    """Send bodies with as many JSON values as the gateway takes, and two of 31 MB with one, all at once."""
    kinds = [_values(value, count) for value, count in zip(_VALUES, _COUNTED, strict=True)]
    long = [_values(b'"%b"' % (text * (31 * MIB // len(text))), 1) for text in (b"A", b'\\"')]
    await _at_once(port, report, [*kinds, _keys(280_000), *long])


async def drip(port: int, hold_s: float, report: Report) -> None:
    """Send 500 heads, a byte a second."""
    peers = await connect_many(port, 500, report)
    end_s = time.monotonic() + hold_s
    for byte in _HEAD + b"x: " + b"y" * 1000:
        if time.monotonic() >= end_s:
            break
        for peer in peers:
            if peer.is_open():
                peer.writer.write(bytes([byte]))
        await asyncio.sleep(1.0)
    await hold(peers, report, 0.0)
    report.held_s = hold_s


def _chat(word: bytes, *, stream: bool = False) -> bytes:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "%b"}]%b}' % (
        word,
        b', "stream": true' if stream else b"",
    )
    return _HEAD + _KEY + b"content-length: %d\r\n\r\n" % len(body) + body


async def tenants(port: int, hold_s: float, report: Report) -> None:
    """Send requests of a new tenant each, 64 at a time, and leave with half of them unanswered."""
    end_s = time.monotonic() + _FLOOD_S

    async def one(number: int) -> None:
        while time.monotonic() < end_s and (peer := await connect(port)) is not None:
            report.opened += 1
            name = b"x-tenant: %d\r\n" % (report.opened * 1000 + number)
            head, body = _post(b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}')
            await peer.send(head.replace(b"\r\n\r\n", b"\r\n" + name + b"\r\n"), body)
            if number % 2:
                report.answers[await peer.status()] += 1
            peer.close()

    await asyncio.gather(*[one(number) for number in range(64)])


async def engine_endless(port: int, hold_s: float, report: Report) -> None:
    """Ask for four answers that never end, in one piece by their type: at most 13 MB a second each."""
    peers = await connect_many(port, 4, report)
    await asyncio.gather(*[peer.send(_chat(ENDLESS)) for peer in peers])

    async def drain(peer: Peer) -> int:
        received = 0
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(hold_s):
                while data := await peer.reader.read(MIB):
                    received += len(data)
        return received

    received = sum(await asyncio.gather(*[drain(peer) for peer in peers]))
    report.notes.append(f"{received / MIB:.1f} MiB received")
    await hold(peers, report, 0.0)
    report.held_s = hold_s


async def engine_events(port: int, hold_s: float, report: Report) -> None:
    """Publish nonsense about one KV cache, as fast as it goes: nested, of 16 MB, and of 30,000 hashes."""
    import msgspec
    import zmq

    def batch(**fields: object) -> bytes:
        event = {"type": "BlockStored", "medium": "GPU", "block_hashes": [1], **fields}
        return msgspec.msgpack.encode([0.0, [event] * 4])

    hashes = [os.urandom(32) for _ in range(7_500)]
    nested, long = b"\x92\xca\0\0\0\0" + b"\x91" * 100_000, bytes(16 * MIB)
    batches = [*[nested, batch(group_idx=[7]), batch(block_hashes=hashes)] * 16, long]
    socket: Any = zmq.Context.instance().socket(zmq.PUB)
    socket.set(zmq.SNDHWM, 8)
    socket.bind(f"ipc://{os.environ['FOLDER']}/events")
    end_s, number = time.monotonic() + _FLOOD_S, 0
    while time.monotonic() < end_s:
        socket.send_multipart([b"", number.to_bytes(8), batches[number % len(batches)]])
        number += 1
        await asyncio.sleep(0.001)
    socket.close(linger=0)
    report.notes.append(f"{number} messages")


async def never_reads(port: int, hold_s: float, report: Report) -> None:
    """Hold eight streams of 100 MB without reading them."""
    peers = [peer for peer in [await connect(port, limit=1024) for _ in range(8)] if peer is not None]
    report.opened = len(peers)
    for peer in peers:
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined] # uvloop's transports have it
        await peer.send(_chat(LONG, stream=True))
    await hold(peers, report, hold_s)


async def framing(port: int, hold_s: float, report: Report) -> None:
    """Send requests whose end is ambiguous, each with another one inside (`benchmarks.attacks.framing`)."""
    upstream = int(os.environ["UPSTREAM"])
    for case in CASES:
        before = await _seen(upstream, "smuggled")
        peer = await connect(port)
        if peer is None:
            report.notes.append(f"{case.name}: not accepted")
            continue
        report.opened += 1
        await peer.send(case.request(_PATH, _KEY))
        status = await peer.status(2.0)
        report.answers[status] += 1
        await asyncio.sleep(0.2)  # what is passed on after the answer
        seen = await _seen(upstream, "smuggled") > before
        report.smuggled += seen
        report.notes.append(f"{case.name}: {status}{', SMUGGLED' if seen else ''}")
        peer.close()


async def unknown_responses(port: int, hold_s: float, report: Report) -> None:
    """Ask for a stored response that nobody has, as fast as 16 connections go."""
    upstream = int(os.environ["UPSTREAM"])
    before = await _seen(upstream, "asked")
    await _repeat(port, report, 16, b"GET /v1/responses/resp_unknown HTTP/1.1\r\nhost: a\r\n%b\r\n" % _KEY)
    report.notes.append(f"{await _seen(upstream, 'asked') - before} questions to replicas")


async def _seen(upstream: int, what: str) -> int:
    """Return how many requests of a kind the replicas have seen."""
    peer = await connect(upstream)
    assert peer is not None
    await peer.send(b"GET /stats HTTP/1.1\r\nhost: a\r\n\r\n")
    counts: dict[str, int] = json.loads(await peer.body() or b"{}")
    peer.close()
    return counts[what]


_PREFLIGHT = (
    b"OPTIONS %b HTTP/1.1\r\nhost: a\r\norigin: http://evil.example\r\naccess-control-request-method: POST\r\n"
    b"access-control-request-headers: authorization\r\n\r\n" % _PATH
)
_LINES = b"".join(b"x%d: y\r\n" % number for number in range(1000))
ATTACKS: dict[str, Attack] = {
    "header-value": _flood(_HEAD + _KEY + b"x: ", b"y" * 65_536, 64 * MIB),
    "url": _flood(b"GET /", b"u" * 65_536, 100 * MIB),
    "many-headers": _flood(_HEAD + _KEY, _LINES, 100 * len(_LINES)),
    "chunk-extensions": _flood(_HEAD + _KEY + b"transfer-encoding: chunked\r\n\r\n1;", b"e" * 65_536, 100 * MIB),
    "keyless": keyless,
    "garbage": _over_and_over(16, bytes(range(256)) * 64),
    "preflights": _over_and_over(16, _PREFLIGHT),
    "pipelined": _over_and_over(
        8, b"GET /nothing HTTP/1.1\r\nhost: a\r\n%b\r\n" % _KEY * 200 + b"\x00\xff NO HTTP\r\n\r\n"
    ),
    "framing": framing,
    "unknown-responses": unknown_responses,
    "silent": _held(10_000),
    "half-heads": _held(1_000, _HEAD + b"x-a: 1\r\n"),
    "half-bodies": _held(12, _HEAD + _KEY + b"content-length: %d\r\n\r\n" % (60 * MIB + 1), *[b" " * MIB] * 60),
    "nested-batch": nested_batch,
    "nested-line": nested_line,
    "small-values": small_values,
    "most-values": most_values,
    "drip": drip,
    "tenants": tenants,
    "engine-garbage": _over_and_over(4, _chat(GARBAGE)),
    "engine-endless": engine_endless,
    "engine-events": engine_events,
    "never-reads": never_reads,
}


async def main(name: str, port: int, hold_s: float) -> None:
    """Run one attack and print its report."""
    report = Report()
    await ATTACKS[name](port, hold_s, report)
    print(json.dumps({**vars(report), "answers": dict(report.answers)}))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
