"""One batch from its validation to its output, by the one gateway that holds its lease.

Each answer is written as it comes, under the number of its line. Whoever goes on after a crash reads them, and runs the
other lines. The output is made of them at the end: it has one answer of each line, even of one that ran twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import orjson

from backends import background
from gateway.batches.line_request import Answer, LineRequest, client_of_lines
from gateway.batches.lines import check, problem, written
from gateway.batches.storage import Document, Lease, Storage
from gateway.batches.throttle import WAIT_S, Throttle
from gateway.dialects.errors import GatewayError
from gateway.routing.keys import Client

if TYPE_CHECKING:
    from gateway.service.assembly import Gateway

ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})
_LOST: Final = "lost"
"""What a run ends with that another one goes on with."""
_RENEW_S: Final = 2.0
_PART_BYTES: Final = 1 << 18
_MOST_TRIES: Final = 3
_WAIT: Final = frozenset({408, 429, 503})
"""Statuses that say that there is no place for a line at present; others of 500 and more count as tries."""


class BatchRun:
    """A batch that this gateway runs."""

    def __init__(
        self, gateway: Gateway, storage: Storage, marker: Document, throttle_of: Callable[[str], Throttle]
    ) -> None:
        self._gateway = gateway
        self._storage = storage
        self._throttle_of = throttle_of
        self._marker = marker
        self._folder = f"{marker['owner']}/batches/{marker['id']}"
        self._lease = Lease(storage, f"{self._folder}/lease.json")
        self._record: Document = {}
        self._writing = asyncio.Lock()
        self._seen = bytearray()  # by number of the line, whether it had an answer when all were read
        self._unwritten: list[bytes] = []
        self._part, self._part_number = b"", 0
        self._requests: set[LineRequest] = set()
        self.is_ended = False
        self._end = ""  # the status that it is to end with

    def end(self, status: str = _LOST) -> None:
        """End what is in flight, and then the batch with a status; without one, let others go on with it."""
        self._end = self._end or status
        for request in [*self._requests]:
            request.give_up()

    async def run(self, most_lines: int) -> None:
        """Run the batch, if no other gateway does."""
        if not await asyncio.to_thread(self._lease.take):
            return
        renewing = background.keep_running("batches", self._renew)
        try:
            record = await asyncio.to_thread(self._storage.read, f"{self._folder}/batch.json") or {"status": "failed"}
            if record["status"] not in ENDED:
                self._record = record
                problems = await self._problems(most_lines)
                if problems:
                    await self._set("failed", errors={"object": "list", "data": problems})
                else:
                    await self._run_lines()
            if self._end != _LOST:
                marker = f"open/{self._marker['owner']}.{self._marker['id']}"
                await asyncio.to_thread(self._storage.remove, f"{marker}.cancel", marker, f"{self._folder}/answers")
                self.is_ended = True
        finally:
            renewing.cancel()
            await asyncio.to_thread(self._lease.release)

    async def _problems(self, most_lines: int) -> list[Document]:
        """Return why the batch cannot run; its lines are checked once."""
        try:
            if self._record["status"] == "validating":
                found = await asyncio.to_thread(check, self._input(), self._record["endpoint"], most_lines)
                if found.problems:
                    return found.problems
                self._record |= {"model": found.model, "request_counts": {"total": found.total}}
            self._model()
        except GatewayError as error:
            return [problem(error.code or "invalid_request", error.message, 1, error.param)]
        return []

    def _model(self) -> tuple[str, Client]:
        relay = self._gateway.relay
        client = client_of_lines(relay.access.keyring, self._marker["client"])
        return relay.router.find(self._record["model"], client, self._record["endpoint"])[0].name, client

    async def _set(self, status: str, **fields: Any) -> None:
        self._record |= {"status": status, f"{status}_at": int(time.time()), **fields}
        await self._save()

    async def _save(self) -> None:
        async with self._writing:
            await asyncio.to_thread(self._storage.write_json, f"{self._folder}/batch.json", {**self._record})

    async def _renew(self) -> None:
        """Renew the lease, and write the counts."""
        while await asyncio.to_thread(self._lease.renew):
            if self._record.get("status") == "in_progress":
                await self._save()
            await asyncio.sleep(_RENEW_S)
        self.end()

    # Lines

    def _input(self) -> Iterator[bytes]:
        return self._storage.lines(f"{self._marker['owner']}/files/{self._record['input_file_id']}.jsonl")

    def _pending(self) -> Iterator[tuple[int, Document]]:
        """Yield the lines that have no answer, with their numbers."""
        for number, line in enumerate(self._input()):
            if line.strip() and not (number < len(self._seen) and self._seen[number]):
                yield number, orjson.loads(line)

    def _answers(self) -> Iterator[tuple[bool, Document]]:
        """Yield whether a line succeeded, and what is written of it: for each line that which comes first.

        What is left of a line whose writing was cut off is no answer.
        """
        seen = bytearray()
        for name in self._storage.names(f"{self._folder}/answers"):
            for line in self._storage.lines(f"{self._folder}/answers/{name}"):
                try:
                    number, is_ok, document = orjson.loads(line)
                except orjson.JSONDecodeError:
                    continue
                seen.extend(bytes(max(0, number + 1 - len(seen))))
                if not seen[number]:
                    seen[number] = True
                    yield is_ok, document
        self._seen = seen

    async def _run_lines(self) -> None:
        answered = await asyncio.to_thread(lambda: [is_ok for is_ok, _ in self._answers()])
        counts = self._record["request_counts"]
        counts |= {"completed": sum(answered), "failed": len(answered) - sum(answered)}
        began_s = self._record["in_progress_at"] or int(time.time())
        await self._set("in_progress", in_progress_at=began_s)
        model, client = self._model()
        throttle, lines, running = self._throttle_of(model), self._pending(), set[asyncio.Task[None]]()
        while not self._end and (line := await asyncio.to_thread(next, lines, None)) is not None:
            if await throttle.enter(self._has_end):
                task = background.start("batches", self._run_line(*line, client, throttle))
                running.add(task)
                task.add_done_callback(running.discard)
        while running:
            throttle.places()  # the last lines make room too
            await asyncio.wait(running, timeout=WAIT_S)
        if self._end != _LOST:
            await self._finish(self._end or "completed")

    def _has_end(self) -> bool:
        return bool(self._end)

    async def _run_line(self, number: int, line: Document, client: Client, throttle: Throttle) -> None:
        """Run a line, which has a place."""
        try:
            answer = Answer(503)
            for _ in range(_MOST_TRIES):
                while (answer := await self._send(line, client, throttle)).status in _WAIT:
                    if not await throttle.enter_again(self._has_end):
                        return
                if 0 < answer.status < 500 or self._end:
                    break
            name = "completed" if 0 < answer.status < 300 else "failed"
            if answer.status or not self._end:
                response = answer.document() if answer.status else None
                document = written(line["custom_id"], response, "no_answer", "The answer broke off each time.")
                await self._write(orjson.dumps([number, name == "completed", document]) + b"\n")
                self._record["request_counts"][name] += 1
                throttle.count(name)
        except BaseException:
            self.end()  # what is written is not known
            raise
        finally:
            throttle.leave()

    async def _send(self, line: Document, client: Client, throttle: Throttle) -> Answer:
        request = LineRequest(self._gateway.relay, client, self._record["endpoint"], orjson.dumps(line["body"]))
        self._requests.add(request)
        throttle.requests[request] = None
        try:
            return Answer(0) if self._end else await request.answer(throttle.full())
        finally:
            self._requests.discard(request)
            del throttle.requests[request]

    async def _write(self, answer: bytes) -> None:
        """Write an answer durably, together with those that came while others were written."""
        self._unwritten.append(answer)
        async with self._writing:
            if self._unwritten:
                self._part += b"".join(self._unwritten)
                self._unwritten.clear()
                path = f"{self._folder}/answers/{self._lease.holder}-{self._part_number:06}"
                await asyncio.to_thread(self._storage.write, path, [self._part])
                if len(self._part) >= _PART_BYTES:
                    self._part, self._part_number = b"", self._part_number + 1

    # The end

    async def _finish(self, status: str) -> None:
        """Make the output of the answers, and end."""
        await self._set("finalizing")
        owner, batch_id, counts = self._marker["owner"], self._marker["id"], self._record["request_counts"]
        fields = await asyncio.to_thread(self._storage.read, f"open/{owner}.{batch_id}.cancel") or {}
        for name in ("output", "error"):
            file_id = f"file-{batch_id.removeprefix('batch_')}-{name}"
            path = f"{owner}/files/{file_id}"
            lines = self._output(is_ok=name == "output", is_expired=status == "expired")
            size_bytes = await asyncio.to_thread(self._storage.write, f"{path}.jsonl", lines)
            if size_bytes:
                record = file_record(file_id, size_bytes, f"{batch_id}_{name}.jsonl", "batch_output")
                await asyncio.to_thread(self._storage.write_json, f"{path}.json", record)
                fields[f"{name}_file_id"] = file_id
            else:
                await asyncio.to_thread(self._storage.remove, f"{path}.jsonl")
        if status == "expired":
            counts["failed"] = counts["total"] - counts["completed"]
        await self._set(status, **fields)

    def _output(self, *, is_ok: bool, is_expired: bool) -> Iterator[bytes]:
        for was_ok, document in self._answers():
            if was_ok == is_ok:
                yield orjson.dumps(document) + b"\n"
        for _, line in self._pending() if is_expired and not is_ok else ():
            text = "This request was not executed before the completion window expired."
            yield orjson.dumps(written(line["custom_id"], None, "batch_expired", text)) + b"\n"


def file_record(file_id: str, size_bytes: int, name: str, purpose: str) -> Document:
    """Return what is told of a file, in OpenAI's form."""
    record = {"id": file_id, "object": "file", "bytes": size_bytes, "created_at": int(time.time())}
    return record | {"filename": name, "purpose": purpose, "status": "processed", "expires_at": None}
