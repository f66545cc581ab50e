"""One answer on one connection, written piece by piece, so that a fault can come after any of them."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from typing import Any

from benchmarks.faults.asking import MODEL, TOKEN_S, Work

_STREAM = b"content-type: text/event-stream\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"
_RESET = struct.pack("ii", 1, 0)


class Wire:
    """The answer to one request.

    Attributes
    ----------
    position
        Tokens of the answer made so far, those of the request included.
    is_answered
        Whether the answer was made and written to its end.
    is_chunked
        Whether a stream is framed in chunks; else its end is that of the connection.
    """

    def __init__(self, transport: asyncio.Transport, work: Work, on_token: Callable[[], None]) -> None:
        self._transport = transport
        self._on_token = on_token
        self._write: Callable[[bytes], None] = transport.write
        self.work = work
        self.position = work.begins_at
        self.is_answered = False
        self.is_chunked = True

    def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._write(data)

    def send_to(self, take: Callable[[bytes], None] | None) -> None:
        """Pass what is sent from now on to `take` instead of the client; None restores sending."""
        self._write = self._transport.write if take is None else take

    def reset(self) -> None:
        """Reset the connection: what was sent last may be lost."""
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()

    def close(self) -> None:
        """Close the connection once everything is sent."""
        self._transport.close()

    def whole(self, body: bytes, kind: bytes = b"application/json", status: int = 200) -> None:
        """Send an answer in one piece."""
        self.send(self.whole_head(body, kind, status) + body)

    def whole_head(self, body: bytes, kind: bytes = b"application/json", status: int = 200) -> bytes:
        """Return the head of an answer in one piece."""
        return b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (status, kind, len(body))

    def stream_head(self, version: bytes = b"HTTP/1.1", more: bytes = b"") -> None:
        """Send the head of a stream."""
        framing = _CHUNKED if self.is_chunked else b""
        self.send(version + b" 200 OK\r\n" + _STREAM + more + framing + b"\r\n")

    def begin(self, version: bytes = b"HTTP/1.1", more: bytes = b"") -> None:
        """Send the head of a stream, and its first event."""
        self.stream_head(version, more)
        if self.work.is_chat:
            ids: dict[str, Any] = {"prompt_token_ids": self.work.prompt_ids} if self.work.with_ids else {}
            self.event(self._chunk({"delta": {"role": "assistant", "content": ""}}, **ids))

    async def generate(self, end: int | None = None) -> None:
        """Make tokens up to one of this number, and send each as an event if the request asks for a stream."""
        while self.position < (self.work.tokens if end is None else end):
            await asyncio.sleep(TOKEN_S)
            self._on_token()
            if self.work.is_stream:
                self.event(self.token())
            self.position += 1

    def token(self) -> bytes:
        """Return the event with the next token."""
        work, position = self.work, self.position
        choice: dict[str, Any] = (
            {"delta": {"content": work.word(position)}} if work.is_chat else {"text": work.word(position)}
        )
        if work.with_ids:
            choice["token_ids"] = [work.word_id(position)]
            if not work.is_chat and position == work.begins_at:
                choice["prompt_token_ids"] = work.prompt_ids
        if position == work.tokens - 1:
            choice["finish_reason"] = "stop"
        return self._chunk(choice)

    def event(self, data: bytes) -> None:
        """Send an event of a stream."""
        self.send(framed(data) if self.is_chunked else data)

    def finish(self, reason: str) -> None:
        """Send an event that ends the text of a stream, whatever is missing of it."""
        text: dict[str, Any] = {"delta": {}} if self.work.is_chat else {"text": ""}
        self.event(self._chunk(text | {"finish_reason": reason}))

    def last_events(self) -> None:
        """Send the events that end a stream, after that of its last token."""
        self.event(b"data: " + json.dumps(self._document([], usage=True)).encode() + b"\n\n")
        self.event(b"data: [DONE]\n\n")

    def end(self, trailers: bytes = b"") -> None:
        """Send the end of a stream's HTTP message."""
        if self.is_chunked:
            self.send(b"0\r\n" + trailers + b"\r\n")
        else:
            self.close()
        self.is_answered = True

    async def document(self) -> bytes:
        """Make all tokens, and return them as one document."""
        await self.generate()
        return self.body()

    def body(self, reason: str | None = "stop") -> bytes:
        """Return the tokens so far as one document."""
        text = self.work.text(self.work.begins_at, self.position)
        choice = {"message": {"role": "assistant", "content": text}} if self.work.is_chat else {"text": text}
        document = self._document([{"index": 0, **choice, "finish_reason": reason}], usage=True)
        return json.dumps(document).encode()

    def _document(self, choices: list[dict[str, Any]], *, usage: bool = False) -> dict[str, Any]:
        chat = "chat.completion.chunk" if self.work.is_stream else "chat.completion"
        kind = chat if self.work.is_chat else "text_completion"
        document: dict[str, Any] = {"id": "x", "object": kind, "created": 1, "model": MODEL, "choices": choices}
        if usage:
            made = self.work.tokens - self.work.begins_at
            prompt = 10 + self.work.begins_at
            document["usage"] = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        return document

    def _chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        document = self._document([{"index": 0, "finish_reason": None, **choice}]) | more
        if self.work.padding_bytes:
            document["padding"] = "x" * self.work.padding_bytes
        return b"data: " + json.dumps(document).encode() + b"\n\n"


def framed(data: bytes) -> bytes:
    """Return data as a chunk of an HTTP message."""
    return b"%x\r\n%b\r\n" % (len(data), data)
