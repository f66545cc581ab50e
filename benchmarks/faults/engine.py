"""A replica that fails on demand: `python -m benchmarks.faults.engine HOST PORT LOG`.

It answers chats and completions, whole and streamed, one token each `TOKEN_S`. A prompt has an id and a number of
tokens (`benchmarks.faults.asking`), and each word of the answer has the id and its own number in it, so that an answer
that is cut, repeated or another's is seen. A prompt of token ids may have the beginning
of the answer in it, which is continued.

Each line of its standard input is the name of a fault (`benchmarks.faults.misbehaviour`), `well` or `look`; it answers
each with a line of JSON. Each request that begins, ends or is given up by the client is a line of LOG.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.faults import misbehaviour
from benchmarks.faults.asking import LINES, MODEL, Work, decoded, work_of
from benchmarks.faults.wire import Wire
from benchmarks.overhead.upstream import Upstream

WELL, LOOK, HANG, REFUSE, RESET_ACCEPT = "well", "look", "hang", "refuse", "reset-accept"
_INFERENCE = (b"/v1/chat/completions", b"/v1/completions")
_LISTED = [{"id": name, "object": "model", "max_model_len": 65536} for name in (MODEL, LINES)]
_MODELS = json.dumps({"object": "list", "data": _LISTED}).encode()
_OTHERS = {
    b"/health": b"{}",
    b"/v1/models": _MODELS,
    b"/get_model_info": json.dumps({"model_path": MODEL}).encode(),
    b"/get_server_info": b"{}",
}
_METRICS = (
    "vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\n"
    "vllm:prompt_tokens_total {ended}\nvllm:generation_tokens_total {tokens}\n"
    'vllm:engine_sleep_state{{sleep_state="awake"}} {awake}\n'
)


@dataclass
class Counts:
    """What the replica has done so far, and does now."""

    ended: int = 0
    tokens: int = 0
    running: int = 0


class Replica:
    """The state that all connections share."""

    def __init__(self, host: str, port: int, log: int) -> None:
        self._address = host, port
        self._log = log
        self._server: asyncio.Server | None = None
        self.fault = WELL
        self.counts = Counts()
        self.connections: set[Connection] = set()

    async def listen(self) -> None:
        """Accept connections."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(lambda: Connection(self), *self._address, backlog=1024)

    async def set_fault(self, fault: str) -> None:
        """Begin with a fault, or end it."""
        self.fault = fault
        if fault == REFUSE and self._server is not None:
            self._server.close()
            self._server = None
        elif fault != REFUSE:
            await self.listen()
        if fault in (REFUSE, RESET_ACCEPT):  # else they would go on, on connections that are kept
            for connection in list(self.connections):
                connection.close_if_idle()

    def note(self, event: str, work: Work) -> None:
        """Write a line of the log at once, so that it outlives a kill."""
        os.write(self._log, f"{event} {work.request_id} {time.monotonic():.4f}\n".encode())


class Connection(Upstream):
    """One connection."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self._replica = replica
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._replica.connections.add(self)
        if self._replica.fault == RESET_ACCEPT:
            self._wire(None).reset()

    def connection_lost(self, exc: Exception | None) -> None:
        self._replica.connections.discard(self)
        if self._task is not None:
            self._task.cancel()

    def close_if_idle(self) -> None:
        """Close the connection unless it has a request."""
        if self._task is None or self._task.done():
            self._transport.close()

    def on_message_complete(self) -> None:
        replica = self._replica
        if replica.fault == HANG:
            return
        if self._url in _INFERENCE:
            self._task = asyncio.get_running_loop().create_task(self._answer())
        elif self._url == b"/detokenize":
            text = decoded(json.loads(self._body)["tokens"])
            self._wire(None).whole(json.dumps({"prompt": text}).encode())
        elif self._url == b"/metrics":
            counts = replica.counts
            is_asleep = replica.fault == misbehaviour.ASLEEP
            running = 0 if is_asleep or replica.fault == misbehaviour.STANDS_STILL else counts.running
            awake = int(not is_asleep)
            page = _METRICS.format(running=running, ended=counts.ended, tokens=counts.tokens, awake=awake)
            self._wire(None).whole(page.encode(), b"text/plain")
        elif self._url == b"/v1/models" and replica.fault == misbehaviour.OTHER_MODEL:
            self._wire(None).whole(_MODELS.replace(MODEL.encode(), b"other"))
        elif self._url == b"/v1/models" and replica.fault == misbehaviour.OTHER_KEY:
            self._wire(None).whole(b'{"error": "Unauthorized"}', status=401)
        else:
            self._wire(None).whole(_OTHERS.get(self._url, b"{}"))

    def _wire(self, work: Work | None) -> Wire:
        return Wire(self._transport, work or Work(0, 0), self._count_token)

    def _count_token(self) -> None:
        self._replica.counts.tokens += 1

    async def _answer(self) -> None:
        replica, counts = self._replica, self._replica.counts
        try:
            document: dict[str, Any] = json.loads(self._body)
            work = work_of(document, is_chat=self._url == _INFERENCE[0])
        except (ValueError, LookupError, TypeError) as error:
            self._wire(None).whole(json.dumps({"error": {"message": repr(error), "code": 400}}).encode(), status=400)
            return
        wire = self._wire(work)
        counts.running += 1
        replica.note("refuse" if replica.fault in misbehaviour.REFUSALS else "begin", work)
        try:
            await misbehaviour.BEHAVIOURS.get(replica.fault, misbehaviour.well)(wire)
            if wire.is_answered:
                counts.ended += 1
                replica.note("end", work)
        except asyncio.CancelledError:
            replica.note("cancel", work)
            raise
        finally:
            counts.running -= 1


async def _serve(host: str, port: int, log: str) -> None:
    replica = Replica(host, port, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    await replica.listen()
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    print(json.dumps(vars(replica.counts)), flush=True)
    while line := await commands.readline():
        name = line.decode().strip()
        if name != LOOK:
            await replica.set_fault(name)
        print(json.dumps(vars(replica.counts)), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
