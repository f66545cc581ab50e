"""One batch from its validation to its output, by the one gateway that holds its lease.

Each answer is written as it comes, under the number of its line. Whoever goes on after a crash reads them, and runs the
other lines. The output is made of them at the end: it has one answer of each line, even of one that ran twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import orjson

from backends import background
from gateway.batches.answers import Answers
from gateway.batches.lease import Lease
from gateway.batches.line_request import Answer, LineRequest, client_of_lines
from gateway.batches.lines import answer_line, check, unanswered_line
from gateway.batches.records import ENDED, Document, file_record, problem
from gateway.batches.storage import Storage
from gateway.batches.throttle import Throttle
from gateway.dialects.errors import GatewayError
from gateway.routing.keys import Client

if TYPE_CHECKING:
    from gateway.service.assembly import Gateway

_LOST: Final = "lost"
"""What a run ends with that another one goes on with."""
_RENEW_S: Final = 2.0
_MOST_TRIES: Final = 3
_WAIT: Final = frozenset({408, 429, 503})
"""Statuses that say that there is no place for a line at present; others of 500 and more count as tries."""


class BatchRun:
    """A batch that this gateway runs."""

    def __init__(
        self,
        gateway: Gateway,
        storage: Storage,
        throttle_of: Callable[[str], Throttle],
        most_lines: int,
        marker: Document,
    ) -> None:
        self._gateway = gateway
        self._storage = storage
        self._throttle_of = throttle_of
        self._most_lines = most_lines
        self._id: str = marker["id"]
        self._client_name: str = marker["client"]
        self._owner: str = marker["owner"]
        self._marker = f"open/{self._owner}.{self._id}"
        self._folder = f"{self._owner}/batches/{self._id}"
        self._lease = Lease(storage, f"{self._folder}/lease.json")
        self._answers = Answers(storage, f"{self._folder}/answers", self._lease.holder)
        self._record: Document = {}
        self._saving = asyncio.Lock()
        self._end = ""  # the status that it is to end with
        self._requests: set[LineRequest] = set()

    def end(self, status: str = _LOST) -> None:
        """End what is in flight, and then the batch with a status; without one, let others go on with it."""
        if not self._end:
            self._end = status
            for request in [*self._requests]:
                request.give_up()

    async def run(self) -> bool:
        """Run the batch; return False if another gateway does."""
        if not await asyncio.to_thread(self._lease.take):
            return False
        renewing = background.keep_running("batches", self._renew)
        try:
            record = await asyncio.to_thread(self._storage.read, f"{self._folder}/batch.json")
            if record is not None and record["status"] not in ENDED:
                self._record = record
                await self._run()
            if self._end != _LOST:
                left = (f"{self._marker}.cancel", self._marker, f"{self._folder}/answers")
                await asyncio.to_thread(self._storage.remove, *left)
        finally:
            renewing.cancel()
            await asyncio.to_thread(self._lease.release)
        return True

    async def _run(self) -> None:
        try:
            if self._record["status"] == "validating":
                await self._validate()
            model, client = self._model(self._record["model"])
            await self._run_lines(self._throttle_of(model), client)
        except _InvalidError as error:
            await self._fail(error.problems)
        except GatewayError as error:
            await self._fail([problem(error.code or "invalid_request", error.message, 1, error.param)])
        except FileNotFoundError:
            await self._fail([problem("file_not_found", "The input file is gone.", param="input_file_id")])
        else:
            if self._end != _LOST:
                await self._finish(self._end or "completed")

    async def _validate(self) -> None:
        endpoint = self._record["endpoint"]
        checked = await asyncio.to_thread(lambda: check(self._input(), endpoint, self._most_lines))
        if checked.problems:
            raise _InvalidError(checked.problems)
        self._model(checked.model)
        counts = {"total": checked.total, "completed": 0, "failed": 0}
        await self._set("in_progress", model=checked.model, request_counts=counts)

    def _model(self, name: str) -> tuple[str, Client]:
        relay = self._gateway.relay
        client = client_of_lines(relay.access.keyring, self._client_name)
        return relay.router.find(name, client, self._record["endpoint"])[0].name, client

    async def _fail(self, problems: list[Document]) -> None:
        if self._end != _LOST:
            await self._set("failed", errors={"object": "list", "data": problems})

    async def _set(self, status: str, **fields: Any) -> None:
        self._record |= {"status": status, f"{status}_at": int(time.time()), **fields}
        await self._save()

    async def _save(self) -> None:
        async with self._saving:
            document = orjson.dumps(self._record)
            await asyncio.to_thread(self._storage.write, f"{self._folder}/batch.json", [document])

    async def _renew(self) -> None:
        """Renew the lease, and write the counts."""
        while True:
            await asyncio.sleep(_RENEW_S)
            if not await asyncio.to_thread(self._lease.renew):
                self.end()
                return
            if self._record.get("status") == "in_progress":
                await self._save()

    # Lines

    def _input(self) -> Iterator[bytes]:
        return self._storage.lines(f"{self._owner}/files/{self._record['input_file_id']}.jsonl")

    def _pending(self) -> Iterator[tuple[int, Document]]:
        """Yield the lines that have no answer, with their numbers."""
        for number, line in enumerate(self._input()):
            if line.strip() and not self._answers.has(number):
                yield number, orjson.loads(line)

    async def _run_lines(self, throttle: Throttle, client: Client) -> None:
        counts = self._record["request_counts"]
        answered = await asyncio.to_thread(lambda: [is_ok for is_ok, _ in self._answers.read()])
        counts |= {"completed": sum(answered), "failed": len(answered) - sum(answered)}
        lines, running = self._pending(), set[asyncio.Task[None]]()
        try:
            while not self._end and (line := await asyncio.to_thread(next, lines, None)) is not None:
                if not await throttle.enter(self._has_end):
                    break
                task = background.start("batches", self._run_line(*line, client, throttle))
                running.add(task)
                task.add_done_callback(running.discard)
        finally:
            while running:
                await asyncio.wait(running)

    def _has_end(self) -> bool:
        return bool(self._end)

    async def _run_line(self, number: int, line: Document, client: Client, throttle: Throttle) -> None:
        """Run a line, which has a place."""
        has_place = True
        try:
            answer = Answer(0, b"")
            for _ in range(_MOST_TRIES):
                while (answer := await self._send(line, client)).status in _WAIT:
                    throttle.leave(is_refused=True)
                    if not (has_place := await throttle.enter(self._has_end)):
                        return
                if 0 < answer.status < 500:
                    break
            is_ok = 0 < answer.status < 300
            if answer.status:
                written = answer_line(line["custom_id"], answer.status, answer.request_id, answer.body)
            elif self._end:
                return
            else:
                written = unanswered_line(line["custom_id"], "no_answer", "The answer broke off each time.")
            await self._answers.write(number, written, is_ok=is_ok)
            throttle.count("completed" if is_ok else "failed")
            self._record["request_counts"]["completed" if is_ok else "failed"] += 1
        except BaseException:
            self.end()  # it is not known what is written
            raise
        finally:
            if has_place:
                throttle.leave(is_refused=False)

    async def _send(self, line: Document, client: Client) -> Answer:
        if self._end:
            return Answer(0, b"")
        request = LineRequest(self._gateway.relay, client, self._record["endpoint"], orjson.dumps(line["body"]))
        self._requests.add(request)
        try:
            return await request.answer()
        finally:
            self._requests.discard(request)

    # The end

    async def _finish(self, status: str) -> None:
        """Make the output of the answers, and end."""
        fields: Document = {}
        if status == "cancelled":
            marker = await asyncio.to_thread(self._storage.read, f"{self._marker}.cancel")
            fields |= marker or {}
        await self._set("finalizing")
        for name in ("output", "error"):
            file_id = f"file-{self._id.removeprefix('batch_')}-{name}"
            path = f"{self._owner}/files/{file_id}"
            lines = self._output(is_ok=name == "output", is_expired=status == "expired")
            size_bytes = await asyncio.to_thread(self._storage.write, f"{path}.jsonl", lines)
            if size_bytes:
                record = file_record(file_id, size_bytes, f"{self._id}_{name}.jsonl", "batch_output")
                await asyncio.to_thread(self._storage.write_json, f"{path}.json", record)
                fields[f"{name}_file_id"] = file_id
            else:
                await asyncio.to_thread(self._storage.remove, f"{path}.jsonl")
        counts = self._record["request_counts"]
        if status == "expired":
            counts["failed"] = counts["total"] - counts["completed"]
        await self._set(status, **fields)

    def _output(self, *, is_ok: bool, is_expired: bool) -> Iterator[bytes]:
        for was_ok, written in self._answers.read():
            if was_ok == is_ok:
                yield orjson.dumps(written) + b"\n"
        if not is_expired or is_ok:
            return
        with contextlib.suppress(FileNotFoundError):  # its input was deleted
            for _, line in self._pending():
                text = "This request was not executed before the completion window expired."
                yield orjson.dumps(unanswered_line(line["custom_id"], "batch_expired", text)) + b"\n"


class _InvalidError(Exception):
    """A file that cannot be run."""

    def __init__(self, problems: list[Document]) -> None:
        super().__init__(f"{len(problems)} problems")
        self.problems = problems
