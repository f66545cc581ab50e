"""A minimal upstream that answers like one vLLM replica, from constants and with the request's `X-Request-Id`.

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
from email.utils import formatdate
from functools import lru_cache
from typing import Any, cast

import httptools
import uvloop

MODEL = "m"
CHUNKS = int(os.environ.get("CHUNKS", "128"))
FIRST_S = float(os.environ.get("FIRST_S", "0"))
INTERVAL_S = float(os.environ.get("INTERVAL_S", "0.005"))


def answer(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (status, kind, len(body), body)


def document(fields: dict[str, Any]) -> bytes:
    """Return an answer in JSON."""
    return answer(json.dumps(fields).encode())


_COMPLETION = json.dumps(
    {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 140}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 300, "total_tokens": 440, "completion_tokens": 140},
    }
).encode()
# As uvicorn and vLLM write it; the time and the id differ from answer to answer.
_HEAD = b"HTTP/1.1 200 OK\r\ndate: %b\r\nserver: uvicorn\r\n%b\r\nx-request-id: %b\r\n\r\n"
_WHOLE = b"content-length: %d\r\ncontent-type: application/json" % len(_COMPLETION)
_STREAM = b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked"
_OTHERS = {
    b"/health": answer(b""),
    b"/v1/models": document({"object": "list", "data": [{"id": MODEL, "object": "model"}]}),
    b"/metrics": answer(b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n", b"text/plain"),
    b"/get_model_info": document({"model_path": MODEL}),
    b"/get_server_info": answer(b"{}"),
}
LAST_EVENTS = b'data: {"id":"chatcmpl-0","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
# Without a reason to finish the gateway would take each stream for a broken one.
_STREAM_END = b"%x\r\n%b\r\n0\r\n\r\n" % (len(LAST_EVENTS), LAST_EVENTS)


@lru_cache(1)
def date_of(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()


COUNTS = {"requests": 0, "chunks": 0, "streams": 0}
"""Totals sent so far, and streams open now."""


class Upstream(asyncio.Protocol):
    """One connection."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url = self._body = self._request_id = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_message_begin(self) -> None:
        self._url = self._body = b""
        self._request_id = b"%032x" % COUNTS["requests"]

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._request_id = value

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._url == b"/stats":
            self._transport.write(document(COUNTS))
        elif self._url in _OTHERS:
            self._transport.write(_OTHERS[self._url])
        else:
            COUNTS["requests"] += 1
            if b'"stream": true' in self._body or b'"stream":true' in self._body:  # some peers serialise the JSON again
                COUNTS["streams"] += 1
                if FIRST_S:
                    asyncio.get_running_loop().call_later(FIRST_S, self._begin)
                else:
                    self._begin()
            else:
                self._transport.write(self._head(_WHOLE) + _COMPLETION)

    def _head(self, headers: bytes) -> bytes:
        return _HEAD % (date_of(int(time.time())), headers, self._request_id)

    def _begin(self) -> None:
        self._transport.write(self._head(_STREAM))
        self._chunk(0)

    def _chunk(self, number: int) -> None:
        closing = self._transport.is_closing()
        if closing or number == CHUNKS:
            COUNTS["streams"] -= 1
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
        COUNTS["chunks"] += 1
        asyncio.get_running_loop().call_later(INTERVAL_S, self._chunk, number + 1)


async def serve(port: int, kind: type[Upstream] = Upstream) -> None:
    """Serve until terminated."""
    server = await asyncio.get_running_loop().create_server(
        kind, [f"127.0.0.{number}" for number in range(1, 9)], port, backlog=2048
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
