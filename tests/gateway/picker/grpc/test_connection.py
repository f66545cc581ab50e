"""What breaks the rules of RFC 9113 ends a stream or the connection, and nothing is held without bound."""

from __future__ import annotations

import logging
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.picker.grpc import connection as bounds
from gateway.picker.grpc import frames as h2
from gateway.picker.grpc import server
from gateway.picker.grpc.call import MESSAGE_BYTES, MOST_HELD_BYTES, MOST_UNSENT_BYTES, WINDOW_BYTES
from gateway.picker.grpc.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    number,
)
from tests.fuzz.wire import run
from tests.gateway.picker.grpc.peer import (
    HELLO,
    REQUEST,
    Peer,
    Services,
    body_of,
    call,
    data,
    frames_of,
    headers,
    message,
    trailers_of,
)

CANCEL = number(h2.CANCEL)
BLOCK = next(iter(frames_of(headers(1)))).payload


def changed(name: str, value: str | None) -> list[tuple[str, str]]:
    fields = [field for field in REQUEST if field[0] != name]
    return fields if value is None else [*fields, (name, value)]


async def test_a_call_is_answered_in_one_write() -> None:
    peer = Peer()
    found = await peer.exchange(call(1, b"one", b"two"))
    assert [each.kind for each in found] == [HEADERS, DATA, DATA, HEADERS]
    assert body_of(found) == message(b"one") + message(b"two")
    assert trailers_of(found) == {"grpc-status": "0"}
    assert peer.calls[0].is_closed


async def test_greeting_and_acknowledgements() -> None:
    peer = Peer()
    sent, window, acknowledged = await peer.frames()
    assert (sent.kind, window.kind, acknowledged[:2]) == (SETTINGS, WINDOW_UPDATE, (SETTINGS, ACK))
    assert await peer.exchange(frame(PING, 0, 0, b"12345678")) == [(PING, ACK, 0, b"12345678")]
    assert await peer.exchange(frame(PING, ACK, 0, b"12345678"), frame(SETTINGS, ACK, 0, b"")) == []


async def test_padding_priorities_and_blocks_in_parts_are_understood() -> None:
    peer = Peer()
    parts = frame(HEADERS, 0, 1, BLOCK[:5]), frame(CONTINUATION, 0, 1, BLOCK[5:9])
    peer.send(*parts, frame(CONTINUATION, END_HEADERS, 1, BLOCK[9:]))
    padded = b"\3" + bytes(5) + BLOCK + bytes(3)
    peer.send(frame(HEADERS, END_HEADERS | PADDED | h2.HAS_PRIORITY, 3, padded), frame(77, 0, 0, b"unknown"))
    peer.send(frame(PRIORITY, 0, 9, bytes(5)), frame(DATA, PADDED, 1, b"\4" + message(b"hi") + bytes(4)))
    peer.send(frame(DATA, PADDED | END_STREAM, 3, b"\0" + message(b"ho")))
    assert [each.received for each in peer.calls] == [[b"hi"], [b"ho"]]


async def test_trailers_of_a_client_end_its_call() -> None:
    peer = Peer()
    ending = headers(1, [("a", "b")], END_HEADERS | END_STREAM)
    assert trailers_of(await peer.exchange(headers(1), ending))["grpc-status"] == "0"
    assert await peer.goaway(ending) is None  # as it were on its way


@pytest.mark.parametrize(
    ("code", "sent"),
    [
        (h2.FRAME_SIZE_ERROR, b"\0\x40\1\0\0\0\0\0\1"),
        (h2.PROTOCOL_ERROR, data(0, b"a")),
        (h2.PROTOCOL_ERROR, data(5, b"a")),
        (h2.PROTOCOL_ERROR, headers(1) + data(2, b"a")),
        (h2.PROTOCOL_ERROR, headers(1) + frame(DATA, PADDED, 1, b"\5abc")),
        (h2.PROTOCOL_ERROR, headers(1) + frame(DATA, PADDED, 1, b"")),
        (h2.PROTOCOL_ERROR, headers(2)),
        (h2.PROTOCOL_ERROR, headers(0)),
        (h2.STREAM_CLOSED, call(1) + headers(1)),
        (h2.STREAM_CLOSED, headers(5) + headers(3)),
        (h2.PROTOCOL_ERROR, frame(HEADERS, h2.HAS_PRIORITY | END_HEADERS, 1, b"1234")),
        (h2.COMPRESSION_ERROR, frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\x0f")),
        (h2.COMPRESSION_ERROR, frame(HEADERS, END_HEADERS, 1, b"\xfe")),
        (h2.PROTOCOL_ERROR, frame(HEADERS, 0, 1, BLOCK) + data(1, b"")),
        (h2.PROTOCOL_ERROR, frame(HEADERS, 0, 1, BLOCK) + frame(CONTINUATION, END_HEADERS, 3, b"")),
        (h2.PROTOCOL_ERROR, frame(CONTINUATION, END_HEADERS, 1, BLOCK)),
        (h2.PROTOCOL_ERROR, frame(h2.PUSH_PROMISE, END_HEADERS, 1, bytes(4))),
        (h2.PROTOCOL_ERROR, frame(RST_STREAM, 0, 1, CANCEL)),
        (h2.PROTOCOL_ERROR, frame(RST_STREAM, 0, 0, CANCEL)),
        (h2.FRAME_SIZE_ERROR, headers(1) + frame(RST_STREAM, 0, 1, b"abc")),
        (h2.PROTOCOL_ERROR, frame(SETTINGS, 0, 1, b"")),
        (h2.FRAME_SIZE_ERROR, frame(SETTINGS, 0, 0, b"12345")),
        (h2.FRAME_SIZE_ERROR, frame(SETTINGS, ACK, 0, bytes(6))),
        (h2.PROTOCOL_ERROR, h2.settings({h2.ENABLE_PUSH: 2})),
        (h2.PROTOCOL_ERROR, h2.settings({h2.MAX_FRAME_SIZE: 16_383})),
        (h2.FLOW_CONTROL_ERROR, h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 31})),
        (
            h2.FLOW_CONTROL_ERROR,
            headers(1)
            + frame(WINDOW_UPDATE, 0, 1, number(1 << 30))
            + h2.settings({h2.INITIAL_WINDOW_SIZE: (1 << 31) - 1}),
        ),
        (h2.FRAME_SIZE_ERROR, frame(PING, 0, 0, b"1234567")),
        (h2.PROTOCOL_ERROR, frame(PING, 0, 1, bytes(8))),
        (h2.FRAME_SIZE_ERROR, frame(GOAWAY, 0, 0, bytes(7))),
        (h2.FRAME_SIZE_ERROR, frame(WINDOW_UPDATE, 0, 0, bytes(5))),
        (h2.PROTOCOL_ERROR, frame(WINDOW_UPDATE, 0, 0, bytes(4))),
        (h2.PROTOCOL_ERROR, frame(WINDOW_UPDATE, 0, 7, number(1))),
        (h2.FLOW_CONTROL_ERROR, frame(WINDOW_UPDATE, 0, 0, number(h2.MOST_WINDOW))),
        (h2.PROTOCOL_ERROR, frame(PRIORITY, 0, 0, bytes(5))),
    ],
)
async def test_what_ends_the_connection(code: int, sent: bytes) -> None:
    peer = Peer()
    assert await peer.goaway(sent) == code
    assert all(each.is_closed for each in peer.calls)


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\n\r\n", PREFACE + frame(PING, 0, 0, bytes(8)), PREFACE + call(1)])
async def test_another_beginning_ends_the_connection(hello: bytes) -> None:
    peer = Peer(hello=hello)
    assert [each.kind for each in await peer.frames()] == [SETTINGS, WINDOW_UPDATE, GOAWAY]
    assert peer.transport.is_lost


@pytest.mark.parametrize(
    ("code", "sent"),
    [
        (h2.STREAM_CLOSED, headers(1) + data(1, message(b"later"), END_STREAM) + data(1, b"a")),
        (h2.STREAM_CLOSED, headers(1) + data(1, message(b"later"), END_STREAM) + headers(1)),
        (h2.PROTOCOL_ERROR, headers(1) + headers(1)),
        (h2.PROTOCOL_ERROR, headers(1) + headers(1, REQUEST, END_HEADERS | END_STREAM)),
        (h2.PROTOCOL_ERROR, headers(1) + frame(WINDOW_UPDATE, 0, 1, number(0))),
        (h2.FLOW_CONTROL_ERROR, headers(1) + frame(WINDOW_UPDATE, 0, 1, number(h2.MOST_WINDOW))),
        (h2.FRAME_SIZE_ERROR, frame(PRIORITY, 0, 1, bytes(4))),
        (h2.PROTOCOL_ERROR, headers(1, changed(":path", None))),
        (h2.PROTOCOL_ERROR, headers(1, changed(":path", ""))),
        (h2.PROTOCOL_ERROR, headers(1, changed(":scheme", None))),
        (h2.PROTOCOL_ERROR, headers(1, changed(":method", None))),
        (h2.PROTOCOL_ERROR, headers(1, [*REQUEST, (":path", "/late")])),
        (h2.PROTOCOL_ERROR, headers(1, [(":path", "/twice"), *REQUEST])),
        (h2.PROTOCOL_ERROR, headers(1, [(":status", "200"), *REQUEST])),
        (h2.PROTOCOL_ERROR, headers(1, [*REQUEST, ("connection", "close")])),
        (h2.PROTOCOL_ERROR, headers(1, changed("te", "gzip"))),
        (h2.PROTOCOL_ERROR, headers(1, [*REQUEST, ("Upper", "a")])),
        (h2.PROTOCOL_ERROR, headers(1, [*REQUEST, ("a", "b\r\nc")])),
    ],
)
async def test_what_ends_a_stream_leaves_the_others(code: int, sent: bytes) -> None:
    peer = Peer()
    assert await peer.reset(sent) == code
    assert all(each.is_closed for each in peer.calls)
    assert body_of(await peer.exchange(call(9, b"next"))) == message(b"next")


async def test_a_stream_that_the_client_resets_is_closed() -> None:
    peer = Peer()
    assert await peer.exchange(headers(1) + frame(RST_STREAM, 0, 1, CANCEL) + data(1, message(b"on its way"))) == []
    assert peer.calls[0].is_closed
    assert peer.calls[0].received == []


async def test_more_than_the_window_of_a_stream_resets_it() -> None:
    peer = Peer(Services(factor=2))  # answers are not taken, so no more is asked for
    piece = data(1, message(bytes(16_000)))
    await peer.exchange(h2.settings({h2.INITIAL_WINDOW_SIZE: 0}), headers(1))
    sent, found = 0, []
    while not any(each.kind == RST_STREAM for each in found):
        assert sent < 4 * WINDOW_BYTES
        found = await peer.exchange(piece)
        sent += len(piece)
    assert number(h2.FLOW_CONTROL_ERROR) == found[-1].payload
    unsent = sum(2 * len(each) for each in peer.calls[0].received)
    assert unsent <= 2 * MOST_UNSENT_BYTES + 2 * WINDOW_BYTES


async def test_answers_wait_for_the_windows_and_come_in_order() -> None:
    peer = Peer(Services(factor=3))
    peer.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 10}))
    found = await peer.exchange(call(1, b"abcdefgh"), call(3, b"ijk"))
    assert [len(each.payload) for each in found if each.kind == DATA] == [10, 10]
    assert not peer.calls[0].is_closed
    found += await peer.exchange(frame(WINDOW_UPDATE, 0, 1, number(7)))
    found += await peer.exchange(h2.settings({h2.INITIAL_WINDOW_SIZE: 100}))
    for stream, text in ((1, b"abcdefgh"), (3, b"ijk")):
        own = [each for each in found if each.stream == stream]
        assert body_of(own) == message(text * 3)
        assert own[-1].flags & END_STREAM
    assert all(each.is_closed for each in peer.calls)


async def test_the_window_of_the_connection_holds_all_streams_back() -> None:
    peer = Peer(Services(factor=1000))
    peer.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 20}))
    found = await peer.exchange(call(1, bytes(60)), call(3, bytes(60)))
    assert len(body_of(found)) == 65_535
    found += await peer.exchange(frame(WINDOW_UPDATE, 0, 0, number(1 << 20)))
    assert len(body_of(found)) == 2 * 60_005
    assert max(len(each.payload) for each in found) <= h2.FRAME_BYTES


async def test_receiving_asks_for_more() -> None:
    peer = Peer()
    peer.send(headers(1), frame(WINDOW_UPDATE, 0, 1, number(1 << 30)), frame(WINDOW_UPDATE, 0, 0, number(1 << 30)))
    size = bounds.CONNECTION_WINDOW_BYTES
    found = await peer.exchange(*[data(1, message(bytes(16_379)))] * (size // 16_384))
    asked = {0: 0, 1: 0}
    for each in found:
        if each.kind == WINDOW_UPDATE:
            asked[each.stream] += int.from_bytes(each.payload, "big")
    assert all(size // 2 <= more <= size for more in asked.values())


async def test_incomplete_messages_are_held_within_a_bound() -> None:
    peer = Peer()
    begun = message(bytes(MESSAGE_BYTES))[:-1]
    reset, stream = None, 1
    while reset is None:
        assert stream * MESSAGE_BYTES < 4 * MOST_HELD_BYTES
        parts = [data(stream, begun[at : at + h2.FRAME_BYTES]) for at in range(0, len(begun), h2.FRAME_BYTES)]
        reset, stream = await peer.reset(headers(stream), *parts), stream + 2
    assert reset == h2.ENHANCE_YOUR_CALM
    assert peer.connection.held_bytes <= MOST_HELD_BYTES
    await peer.exchange(data(1, b"\0", END_STREAM), call(stream, b"next"))
    assert [len(each.received) for each in peer.calls] == [1, *[0] * (len(peer.calls) - 2), 1]


async def test_too_many_calls_are_refused() -> None:
    peer = Peer()
    opened = b"".join(headers(2 * each + 1) for each in range(bounds.MOST_CALLS))
    assert await peer.exchange(opened) == []
    assert await peer.reset(headers(2 * bounds.MOST_CALLS + 1)) == h2.REFUSED_STREAM
    assert await peer.exchange(frame(RST_STREAM, 0, 1, CANCEL), headers(2 * bounds.MOST_CALLS + 3)) == []


@pytest.mark.parametrize(
    "fruitless",
    [
        lambda stream: frame(PING, 0, 0, bytes(8)),
        lambda stream: frame(SETTINGS, 0, 0, b""),
        lambda stream: frame(PRIORITY, 0, 1, bytes(5)),
        lambda stream: frame(99, 0, 0, b""),
        lambda stream: data(1, b""),
        lambda stream: headers(stream) + frame(RST_STREAM, 0, stream, CANCEL),  # CVE-2023-44487
        lambda stream: headers(stream) + frame(WINDOW_UPDATE, 0, stream, number(0)),  # CVE-2025-8671
    ],
    ids=["ping", "settings", "priority", "unknown", "empty data", "rapid reset", "made to reset"],
)
async def test_a_flood_ends_the_connection(fruitless) -> None:  # type: ignore[no-untyped-def]
    peer = Peer()
    peer.send(headers(1))
    flood = [fruitless(2 * each + 3) for each in range(bounds.MOST_FRUITLESS * 2)]
    assert await peer.goaway(b"".join(flood)) == h2.ENHANCE_YOUR_CALM
    assert len(peer.transport.written) < bounds.MOST_FRUITLESS * 40
    assert all(each.is_closed for each in peer.calls)


@pytest.mark.parametrize(("part", "count"), [(bytes(1000), 20), (b"", 2 * bounds.MOST_FRUITLESS)])
async def test_a_flood_of_continuations_ends_the_connection(part: bytes, count: int) -> None:
    flood = frame(HEADERS, 0, 1, BLOCK) + frame(CONTINUATION, 0, 1, part) * count
    assert await Peer().goaway(flood) == h2.ENHANCE_YOUR_CALM


async def test_a_block_that_unpacks_to_much_ends_the_connection() -> None:
    peer = Peer()
    remembered = b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4000
    assert await peer.goaway(frame(HEADERS, END_HEADERS, 1, remembered + b"\xbe" * 100)) == h2.COMPRESSION_ERROR


@pytest.mark.parametrize("messages", [1, 500])
async def test_others_have_their_turn_within_a_long_read(messages: int) -> None:
    """Whether it has many frames, or frames with many messages."""
    peer, other = Peer(), Peer()
    peer.send(headers(1) + data(1, message(b"a") * messages) * (3000 // messages))
    assert 0 < len(peer.calls[0].received) < 3000
    assert body_of(await other.exchange(call(1, b"turn"))) == message(b"turn")
    await peer.frames()
    assert len(peer.calls[0].received) == 3000


async def test_a_peer_that_does_not_read_is_not_read() -> None:
    peer = Peer()
    peer.connection.pause_writing()
    await peer.frames()
    peer.send(call(1, b"a"))
    assert peer.calls == []
    peer.connection.resume_writing()
    assert body_of(await peer.frames()) == message(b"a")
    peer.connection.pause_writing()
    peer.connection.check(time.monotonic() + 61)
    await peer.transport.settle()
    assert peer.transport.is_lost


@pytest.mark.parametrize("begun", [b"", PREFACE[:9], HELLO + headers(1)[:12], HELLO + frame(HEADERS, 0, 1, b"")])
async def test_what_is_not_completed_ends_the_connection(begun: bytes) -> None:
    peer = Peer(hello=begun)
    now_s = time.monotonic()
    peer.connection.check(now_s + bounds.BEGIN_S - 1)
    await peer.transport.settle()
    assert not peer.transport.is_lost
    peer.connection.check(now_s + bounds.BEGIN_S + 1)
    await peer.transport.settle()
    assert peer.transport.is_lost
    assert peer.services.connections == set()


async def test_a_silent_peer_is_asked_whether_it_is_there() -> None:
    peer = Peer()
    peer.send(headers(1))
    await peer.frames()
    now_s = time.monotonic()
    peer.connection.check(now_s + 31)
    (ping,) = await peer.frames()
    peer.connection.check(now_s + 59)
    assert await peer.exchange(frame(PING, ACK, 0, ping.payload)) == []
    peer.connection.check(now_s + 62)
    assert [each.kind for each in await peer.frames()] == [PING]
    peer.connection.check(time.monotonic() + 61)
    await peer.transport.settle()
    assert peer.calls[0].is_closed


async def test_an_answer_that_is_not_taken_is_cancelled() -> None:
    peer = Peer()
    await peer.exchange(h2.settings({h2.INITIAL_WINDOW_SIZE: 0}), call(1, b"a"))
    peer.connection.check(time.monotonic() + 61)
    assert (RST_STREAM, 0, 1, CANCEL) in await peer.frames()
    assert peer.calls[0].is_closed
    peer.connection.check(time.monotonic() + 59)
    assert await peer.frames() == []


async def test_shutdown_lets_calls_end() -> None:
    peer = Peer()
    await peer.exchange(headers(1) + data(1, message(b"later"), END_STREAM))
    peer.connection.shutdown()
    notice, ping = await peer.frames()
    assert (notice.kind, notice.payload[:4], ping.kind) == (GOAWAY, number(h2.MOST_WINDOW), PING)
    (last,) = await peer.exchange(headers(3) + data(3, message(b"later")) + frame(PING, ACK, 0, ping.payload))
    assert (last.kind, last.payload[:4]) == (GOAWAY, number(3))
    assert await peer.exchange(headers(5) + data(5, message(b"too late"))) == []
    assert len(peer.calls) == 2
    for each in peer.calls:
        assert not peer.transport.is_lost
        each.go_on()
        await peer.transport.settle()
    assert peer.transport.is_lost
    assert all(each.is_closed for each in peer.calls)


async def test_above_the_limit_the_connection_that_is_idle_for_longest_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 4)
    monkeypatch.setattr(server, "_IDLE_AGAIN_S", 0.0)
    services = Services()
    peers = [Peer(services) for _ in range(4)]
    await peers[0].exchange(headers(1))  # has a call
    await peers[1].exchange(frame(PING, 0, 0, bytes(8)))  # has said something after the others

    async def lost() -> list[bool]:
        peers.append(Peer(services))
        for peer in peers:
            await peer.transport.settle()
        return [peer.transport.is_lost for peer in peers]

    assert await lost() == [False, False, True, False, False]
    assert await lost() == [False, False, True, True, False, False]
    for peer in peers[4:]:
        await peer.exchange(headers(1))
    await peers[1].exchange(headers(1))
    assert (await lost())[-1], "all others have calls"
    assert len(services.connections) == 4


async def test_the_connections_that_hold_most_of_incomplete_messages_are_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(server, "MOST_HELD_BYTES", 1_000_000)
    services = Services()
    proxy, *others = [Peer(services) for _ in range(12)]
    await proxy.exchange(headers(1), data(1, message(bytes(2000))[:1000]))
    for peer in others:
        begun = message(bytes(MESSAGE_BYTES))[:160_000]
        await peer.exchange(headers(1), *[data(1, begun[at : at + 16_000]) for at in range(0, len(begun), 16_000)])
        held = [each.connection.held_bytes for each in (proxy, *others)]
        assert sum(held) == services._held_bytes <= 1_000_000
    assert sum(peer.transport.is_lost for peer in others) >= 5
    rest = message(bytes(2000))[1000:]
    assert [each.kind for each in await proxy.exchange(data(1, rest, END_STREAM))][:2] == [HEADERS, DATA]
    for peer in others:
        peer.connection.abort()
        await peer.transport.settle()
    assert services._held_bytes == 0
    assert len(caplog.messages) == 1, "however many there are"


async def test_faults_of_many_connections_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    services = Services()
    for _ in range(100):
        peer = Peer(services)
        peer.connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
        await peer.transport.settle()
    assert len(caplog.messages) == 1


PARTS = st.lists(
    st.one_of(
        st.builds(lambda n, text: call(2 * n + 1, text), st.integers(0, 9), st.binary(max_size=40)),
        st.builds(lambda n, text: data(2 * n + 1, text), st.integers(0, 9), st.binary(max_size=9)),
        st.builds(lambda n, flags: headers(2 * n + 1, REQUEST, flags), st.integers(0, 9), st.sampled_from([0, 4, 5])),
        st.builds(lambda n: frame(RST_STREAM, 0, 2 * n + 1, CANCEL), st.integers(0, 9)),
        st.builds(lambda n, more: frame(WINDOW_UPDATE, 0, n, number(more)), st.integers(0, 9), st.integers(0, 2**31)),
        st.builds(lambda size: h2.settings({h2.INITIAL_WINDOW_SIZE: size}), st.integers(0, 100)),
        st.builds(frame, st.integers(0, 10), st.integers(0, 63), st.integers(0, 9), st.binary(max_size=12)),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(PARTS, st.lists(st.integers(0, 400), max_size=8), st.booleans())
@example([frame(GOAWAY, 0, 0, bytes(8)), h2.settings({})], [], True)
def test_how_the_bytes_are_cut_changes_nothing(parts: list[bytes], cuts: list[int], singly: bool) -> None:
    stream = HELLO + b"".join(parts)
    ends = (
        [*range(1, len(stream) + 1)] if singly else [*sorted({each for each in cuts if 0 < each < len(stream)}), None]
    )
    pieces = [stream[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    async def outcome(pieces: list[bytes]) -> object:
        peer = Peer(hello=b"")
        peer.send(*pieces)
        await peer.transport.settle()
        return bytes(peer.transport.written), [(each.received, each.is_closed) for each in peer.calls]

    assert run(outcome(pieces)) == run(outcome([stream]))
