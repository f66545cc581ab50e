"""A minimal upstream that answers like one vLLM replica, from constants.

Run as `python -m benchmarks.overhead.upstream PORT`. `GET /stats` returns the numbers of requests and chunks sent and
of open streams. A body with `"stream": true` gets CHUNKS chunks, the first after FIRST_S and one every INTERVAL_S; any
other body gets a chat completion of 1 KB.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import cast

import httptools
import uvloop

MODEL = "m"
CHUNKS = int(os.environ.get("CHUNKS", "128"))
FIRST_S = float(os.environ.get("FIRST_S", "0"))
INTERVAL_S = float(os.environ.get("INTERVAL_S", "0.005"))


def _answer(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (status, kind, len(body), body)


_COMPLETION = _answer(
    json.dumps(
        {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "model": MODEL,
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": "word " * 140}, "finish_reason": "stop"}
            ],
            "usage": {"prompt_tokens": 300, "total_tokens": 440, "completion_tokens": 140},
        }
    ).encode()
)
_OTHERS = {
    b"/health": _answer(b""),
    b"/v1/models": _answer(json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()),
    b"/metrics": _answer(b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n", b"text/plain"),
    b"/get_model_info": _answer(json.dumps({"model_path": MODEL}).encode()),
    b"/get_server_info": _answer(b"{}"),
}
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Counts:
    """Totals sent so far."""

    requests = 0
    chunks = 0
    streams = 0


class Upstream(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._url = b""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = self._body = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        assert self._transport is not None
        if self._url == b"/stats":
            counts = {"requests": Counts.requests, "chunks": Counts.chunks, "streams": Counts.streams}
            self._transport.write(_answer(json.dumps(counts).encode()))
        elif self._url in _OTHERS:
            self._transport.write(_OTHERS[self._url])
        else:
            Counts.requests += 1
            if b'"stream": true' in self._body or b'"stream":true' in self._body:  # some peers serialise the JSON again
                Counts.streams += 1
                if FIRST_S:
                    asyncio.get_running_loop().call_later(FIRST_S, self._begin)
                else:
                    self._begin()
            else:
                self._transport.write(_COMPLETION)

    def _begin(self) -> None:
        assert self._transport is not None
        self._transport.write(_STREAM_HEAD)
        self._chunk(0)

    def _chunk(self, number: int) -> None:
        assert self._transport is not None
        closing = self._transport.is_closing()
        if closing or number == CHUNKS:
            Counts.streams -= 1
            if not closing:
                self._transport.write(_STREAM_END)
            return
        # The chunk contains its time of sending, so that its reader can compute the delay.
        event = (
            b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":'
            b'[{"index":0,"delta":{"content":" %017.6f"},"logprobs":null,"finish_reason":null,"token_ids":null}],'
            b'"padding":"0123456789012345678901234567890123456789"}\n\n' % time.monotonic()
        )
        self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))
        Counts.chunks += 1
        asyncio.get_running_loop().call_later(INTERVAL_S, self._chunk, number + 1)


async def serve(port: int, kind: type[Upstream] = Upstream) -> None:
    """Serve until terminated."""
    server = await asyncio.get_running_loop().create_server(
        kind, [f"127.0.0.{number}" for number in range(1, 9)], port, backlog=2048
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
