"""Batched writes: their order, their delay, and the effect of closing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from backends.http import wire
from backends.http.wire import WriteBatch

Pair = tuple[asyncio.Transport, socket.socket]


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    """Return a transport and the other end of its socket, which does not block."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    yield transport, theirs
    transport.abort()
    theirs.close()


def arrived(end: socket.socket) -> bytes:
    """Return the bytes that have arrived at a socket; empty if there are none."""
    try:
        return end.recv(1 << 16)
    except BlockingIOError:
        return b""


async def test_writes_happen_in_order_at_the_end_of_the_iteration(pair: Pair) -> None:
    transport, end = pair
    batch = WriteBatch()
    batch.add(transport, b"one ")
    batch.add(transport, b"two")
    assert arrived(end) == b""
    await asyncio.sleep(0)
    assert arrived(end) == b"one two"


async def test_a_long_iteration_writes_before_its_end(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    transport, end = pair
    batch = WriteBatch()
    monkeypatch.setattr(wire, "MAX_WAIT_S", 3600.0)
    batch.add(transport, b"first ")
    batch.add(transport, b"soon after ")
    assert arrived(end) == b""
    monkeypatch.setattr(wire, "MAX_WAIT_S", 0.0)
    batch.add(transport, b"later")
    assert arrived(end) == b"first soon after later"
    await asyncio.sleep(0)
    assert arrived(end) == b""


async def test_an_immediate_write_flushes_the_batch_first(pair: Pair) -> None:
    transport, end = pair
    batch = WriteBatch()
    batch.add(transport, b"head ")
    batch.write_now(transport, b"chunk")
    assert arrived(end) == b"head chunk"
    await asyncio.sleep(0)
    assert arrived(end) == b""
