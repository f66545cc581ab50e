"""One batch from its validation to its output.

Each line is noted before it is sent, and each answer as it comes. Whoever goes on after a crash reads the notes, and
runs the lines without an answer. The output is made of them at the end: it has one answer of each line.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final

from backends import background
from gateway.batches.bounds import GATEWAY, Refusals, Spending, settings_of
from gateway.batches.line_request import Answer, LineRequest, client_of_lines
from gateway.batches.lines import MOST_LINE_BYTES, Line, check, in_turns, problem, read_line, written
from gateway.batches.notes import BEGUN, COMPLETED, FAILED, RETURNED, Notes
from gateway.batches.records import ENDED, Marker, file_record
from gateway.batches.storage import Document, Storage
from gateway.batches.throttle import Throttle
from gateway.dialects.errors import GatewayError
from gateway.routing.keys import Client

if TYPE_CHECKING:
    from gateway.service.assembly import Gateway

_LOST: Final = "lost"
"""What a run ends with that another one goes on with."""
_SAVE_S: Final = 2.0
_MOST_RUNS: Final = 3
_READ_BYTES: Final = 1 << 20
_MOST_LATER: Final = 1000
_MOST_LATER_BYTES: Final = 64 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 300.0
"""Before a line is sent again that was not answered: four times as long each time."""
_NO_PLACE: Final = frozenset({408, 429, 503})
"""Statuses that say that there is no place for a line at present."""


class BatchRun:
    """A batch that this gateway runs."""

    def __init__(
        self,
        gateway: Gateway,
        storage: Storage,
        marker: Marker,
        throttle_of: Callable[[str], Throttle],
        checking: asyncio.Lock,
    ) -> None:
        self._gateway = gateway
        self._storage = storage
        self._marker = marker
        self._throttle_of = throttle_of
        self._checking = checking  # one file at a time is checked
        self._record: Document = {}
        self._notes = Notes(storage, f"{marker.folder}/answers", lambda: self._end == _LOST)
        self._spending = Spending(storage, marker.owner)
        self._refusals = Refusals()
        self._requests: set[LineRequest] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._later: list[tuple[float, int, Line]] = []  # lines to be sent again, by when; a heap
        self._begun: set[int] = set()  # lines noted as begun that have no answer
        self._is_full = False
        self._end = ""  # the status that it is to end with
        self._problems: list[Document] = []  # why it fails

    def end(self, status: str = _LOST, problems: list[Document] | None = None) -> None:
        """End what is in flight, and then the batch with a status; without one, let others go on with it."""
        self._end, self._problems = self._end or status, self._problems or problems or []
        for request in [*self._requests]:
            request.give_up()

    async def run(self, most_lines: int) -> bool:
        """Run the batch; return whether it has ended."""
        record = await asyncio.to_thread(self._storage.read, f"{self._marker.folder}/batch.json")
        if record is None:
            return False
        self._record = record
        if record["status"] not in ENDED:
            if record["status"] == "validating" and not self._end:
                async with self._checking:
                    await asyncio.to_thread(self._check, most_lines)
            if not self._end:
                await self._run_lines()
            if self._end == _LOST:
                for number in self._begun:
                    await self._notes.add(RETURNED, number)
                return False
            await self._finish(self._end or "completed")
        answers = f"{self._marker.folder}/answers"
        await asyncio.to_thread(self._storage.remove, self._marker.cancel_path, self._marker.path, answers)
        return True

    def _check(self, most_lines: int) -> None:
        """Check all lines, before any of them runs; in a thread."""
        try:
            found = check(self._input(), self._record["endpoint"], most_lines)
        except FileNotFoundError:
            return self.end("failed", [problem("file_not_found", "The input file is gone.")])
        problems = found.problems
        if found.model and not problems:
            try:
                self._gateway.relay.router.find(found.model, self._key(), self._record["endpoint"])
            except GatewayError as error:
                problems = [problem(error.code or "", error.message, 1, error.param)]
        self._record |= {"model": found.model}
        self._record["request_counts"]["total"] = found.total
        if problems:
            self.end("failed", problems)
        return None

    def _key(self) -> Client:
        client = self._gateway.relay.access.keyring.with_id(self._marker.owner)
        if client is None:
            raise GatewayError(401, "The key that this batch belongs to is gone.", code="invalid_api_key")
        return client

    async def _set(self, status: str, **fields: Any) -> None:
        self._record |= {"status": status, f"{status}_at": int(time.time()), **fields}
        await self._save()

    async def _save(self) -> None:
        await asyncio.to_thread(self._storage.write_json, f"{self._marker.folder}/batch.json", {**self._record})

    # Lines

    def _input(self) -> Iterator[bytes]:
        path = f"{self._marker.owner}/files/{self._marker.file_id}.jsonl"
        return self._storage.lines(path, MOST_LINE_BYTES)

    def _pending(self) -> Iterator[Line]:
        """Yield the lines that have no answer."""
        for number, raw in enumerate(in_turns(self._input())):
            if raw.strip() and not self._notes.has(number):
                line = read_line(number, raw)
                if self._notes.begun[number] >= _MOST_RUNS:
                    text = f"{_MOST_RUNS} gateways have ended while they ran this line."
                    line.error = GatewayError(500, text, code="no_answer")
                yield line

    def _read_some(self, lines: Iterator[Line]) -> list[Line]:
        found, size_bytes = list[Line](), 0
        while size_bytes < _READ_BYTES and len(found) < _MOST_LATER and (line := next(lines, None)) is not None:
            found.append(line)
            size_bytes += len(line.body)
        return found

    async def _run_lines(self) -> None:
        kinds = await asyncio.to_thread(lambda: [kind for kind, _ in self._notes.answers()])
        completed = kinds.count(COMPLETED)
        self._record["request_counts"] |= {"completed": completed, "failed": len(kinds) - completed}
        await asyncio.to_thread(self._spending.read)
        await self._set("in_progress", in_progress_at=self._record["in_progress_at"] or int(time.time()))
        model = self._record.get("model") or next(iter(self._gateway.models))  # no line names one: each gets an error
        throttle, lines, ahead, saved_s = self._throttle_of(model), self._pending(), deque[Line](), time.monotonic()
        is_read = False
        while not self._end:
            if not ahead and not is_read and self._may_read():
                ahead.extend(await asyncio.to_thread(self._read_some, lines))
                is_read = not ahead
            if not self._begin(ahead, throttle):
                if not (ahead or self._later or self._running) and is_read:
                    break
                await throttle.wait()
            if time.monotonic() - saved_s > _SAVE_S:
                saved_s = time.monotonic()
                await self._save_counts()
        while self._running:
            await asyncio.wait(self._running)

    def _may_read(self) -> bool:
        """Return whether there is memory for more lines beside those that wait to be sent again."""
        held_bytes = sum(len(line.body) for _, _, line in self._later)
        return len(self._later) < _MOST_LATER and held_bytes < _MOST_LATER_BYTES

    async def _save_counts(self) -> None:
        try:
            await self._save()
            await asyncio.to_thread(self._spending.save)
            await asyncio.to_thread(self._storage.check_room, 0)
            self._is_full = False
        except OSError as error:
            self._is_full = True
            background.note("batches", error, of=self._marker.batch_id, then="; no line begins until it succeeds")

    def _begin(self, ahead: deque[Line], throttle: Throttle) -> bool:
        """Begin a line for which there is a place; return whether there was one."""
        now_s = time.monotonic()
        caps = self._refusals.caps(now_s)
        if self._is_full or GATEWAY in caps:
            return False
        due = [self._later[0][2]] if self._later and self._later[0][0] <= now_s else []
        for line in [*due, *([ahead[0]] if ahead else [])]:
            key = self._enter() if line.error or throttle.closed_to(line, caps) is not None else None
            if key is None:
                continue
            if line in due:
                heappop(self._later)
            else:
                ahead.popleft()
            throttle.enter(line)
            task = background.start("batches", self._run_line(line, key, throttle), of=self._marker.batch_id)
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return True
        return False

    def _enter(self) -> Client | None:
        """Return the key after a place was taken among its limits; None if they allow no line now."""
        key, lines = self._gateway.relay.access.keyring.with_id(self._marker.owner), len(self._running)
        settings = None if key is None else settings_of(self._gateway, key)
        per_day = None if settings is None else settings.batch_tokens_per_day
        if key is None or not self._spending.has_left(lines, per_day):
            return None
        return key if self._gateway.relay.limits.enter_line(key, self._spending.ahead(lines)) else None

    async def _run_line(self, line: Line, key: Client, throttle: Throttle) -> None:
        """Run a line once, and write its answer, or have it wait to be sent again."""
        tokens, pause_s = 0, None
        try:
            if line.error is not None:
                await self._write(line, Answer(0), throttle)
            else:
                request, answer = await self._send(line, key, throttle)
                if request is None or request.is_given_up:
                    pause_s = 0.0
                else:
                    tokens = request.tokens
                    self._spending.add(tokens)
                    pause_s = self._pause_s(line, answer, throttle)
                    if pause_s is None:
                        await self._write(line, answer, throttle)
        except Exception as error:  # noqa: BLE001 -- an error of a line is that line's
            background.note("batches", error, of=f"{self._marker.batch_id}, line {line.number + 1}")
            line.failed += 1
            pause_s = _LONGEST_PAUSE_S
            if line.failed >= _MOST_RUNS:
                line.error = GatewayError(500, "The gateway failed to run this line; see its log.", code="no_answer")
        finally:
            throttle.leave(line)
            self._gateway.relay.limits.leave_line(key, tokens)
        if pause_s is not None and not self._end:
            heappush(self._later, (time.monotonic() + pause_s, line.number, line))

    async def _send(self, line: Line, key: Client, throttle: Throttle) -> tuple[LineRequest | None, Answer]:
        """Send a line, once it is noted, to where there is a place then; without a request if there is none."""
        if line.number not in self._begun:
            self._begun.add(line.number)
            await self._notes.add(BEGUN, line.number)
        closed = throttle.closed_to(line, self._refusals.caps(time.monotonic()))
        if closed is None or self._end:
            return None, Answer(0)

        def note(backend: str) -> bool:
            line.sent += 1
            throttle.sent(line, backend)
            return not line.refused and line.sent < _MOST_RUNS

        relay, began_s = self._gateway.relay, time.monotonic()
        request = LineRequest(relay, client_of_lines(key), self._record["endpoint"], line.body, note)
        self._requests.add(request)
        throttle.begin(line, request)
        try:
            answer = await request.answer(closed)
        finally:
            self._requests.discard(request)
        if 0 < answer.status < 500 and answer.status not in _NO_PLACE and answer.backend:
            throttle.answered(answer.backend, time.monotonic() - began_s)
            self._refusals.take(answer.backend, began_s)
        return request, answer

    def _pause_s(self, line: Line, answer: Answer, throttle: Throttle) -> float | None:
        """Return after how many seconds a line is to be sent again; None if the answer is its answer."""
        if answer.status in _NO_PLACE:
            beside = max(0, throttle.lines_at(answer.backend) - 1) if answer.backend else 0
            if self._refusals.refuse(line, answer.backend, beside=beside, now_s=time.monotonic()):
                return None
            tries = line.refused
        elif 0 < answer.status < 500:
            return None
        else:
            line.failed += 1
            if line.failed >= _MOST_RUNS or line.sent - line.refused >= _MOST_RUNS:
                return None
            tries = line.failed
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 4.0 ** (tries - 1))

    async def _write(self, line: Line, answer: Answer, throttle: Throttle) -> None:
        """Write the answer of a line."""
        is_ok, error = 200 <= answer.status < 300, line.error
        if error is not None:
            document = written(line.custom_id, None, error.code or "", error.message)
        elif answer.status:
            document = await asyncio.to_thread(self._document, line, answer)
        else:
            document = written(line.custom_id, None, "no_answer", "The answer broke off each time.")
        await self._notes.add(COMPLETED if is_ok else FAILED, line.number, document)
        self._begun.discard(line.number)
        outcome = "completed" if is_ok else "failed"
        self._record["request_counts"][outcome] += 1
        throttle.count(outcome)

    def _document(self, line: Line, answer: Answer) -> bytes:
        return written(line.custom_id, answer.document())

    # The end

    async def _finish(self, status: str) -> None:
        """Make the output of the answers, and end."""
        if self._problems:
            await self._set("failed", errors={"object": "list", "data": self._problems})
            return
        await self._set("finalizing")
        fields = await asyncio.to_thread(self._storage.read, self._marker.cancel_path) or {}
        counts = self._record["request_counts"]
        for name, kind in (("output", COMPLETED), ("error", FAILED)):
            file_id = f"file-{self._marker.batch_id.removeprefix('batch_')}-{name}"
            path = f"{self._marker.owner}/files/{file_id}"
            lines = self._output(kind, is_expired=status == "expired")
            size_bytes = await asyncio.to_thread(self._storage.write, f"{path}.jsonl", lines)
            if size_bytes:
                record = file_record(file_id, size_bytes, f"{self._marker.batch_id}_{name}.jsonl", "batch_output")
                await asyncio.to_thread(self._storage.write_json, f"{path}.json", record)
                fields[f"{name}_file_id"] = file_id
            else:
                await asyncio.to_thread(self._storage.remove, f"{path}.jsonl")
        if status == "expired":
            counts["failed"] = counts["total"] - counts["completed"]
        await self._set(status, **fields)

    def _output(self, kind: bytes, *, is_expired: bool) -> Iterator[bytes]:
        """Yield what is written of the lines that have succeeded, or of those that have not."""
        for each, document in self._notes.answers():
            if each == kind:
                yield document + b"\n"
        for line in self._pending() if is_expired and kind == FAILED else ():
            text = "This request was not executed before the completion window expired."
            yield written(line.custom_id, None, "batch_expired", text) + b"\n"
