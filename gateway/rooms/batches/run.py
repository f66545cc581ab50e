"""One batch from its validation to its output.

Each line is noted before it is sent, and each answer on arrival. After a crash, the next run reads the notes, and runs
the lines without an answer. The notes become the output at the end: one answer per line.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from backends import background
from gateway.dialects.errors import GatewayError
from gateway.rooms.batches.line_request import Answer, LineRequest, client_of_lines
from gateway.rooms.batches.lines import MOST_LINE_BYTES, Document, Line, check, in_turns, problem, read_line, written
from gateway.rooms.batches.notes import COMPLETED, FAILED, RUNS, Notes, Spent
from gateway.rooms.batches.places import ModelPlaces
from gateway.rooms.batches.records import ENDED, BatchPlace, BatchRecord, FileRecord
from gateway.rooms.batches.storage import Storage
from gateway.routing.keys import Client

if TYPE_CHECKING:
    from gateway.config.settings.keys import KeySettings
    from gateway.gateway import Gateway

_LOST: Final = "lost"
"""Status of a run that another one will take over."""
_MOST_RUNS, _MOST_REFUSALS = 3, 20
_MOST_HELD, _MOST_HELD_BYTES = 1000, 64 << 20
"""Lines, and bytes of their bodies, above which no more are read; a single line may be larger."""
_PAUSE_S, _LONGEST_S, _LONGEST_CLOSED_S = 0.5, 300.0, 60.0
_GATEWAY: Final = ""
"""Stands for the gateway among the names of backends."""


def settings_of(gateway: Gateway, client: Client) -> KeySettings | None:
    """Return the current settings of a client's key; None if there are none."""
    return next((key for key in gateway.settings.keys if key.name == client.name), None)


class BatchRun:
    """A batch that this gateway runs."""

    def __init__(
        self, gateway: Gateway, storage: Storage, place: BatchPlace, places_of: Callable[[str], ModelPlaces]
    ) -> None:
        self._gateway = gateway
        self._storage = storage
        self._place = place
        self._places_of = places_of
        self._notes = Notes(storage, f"{place.open}.notes", lambda: self._end == _LOST)
        self._waiting: list[Line] = []  # read and to be sent, perhaps again
        self._tasks: dict[asyncio.Task[None], Line] = {}  # those in flight
        self._record: BatchRecord
        self._places: ModelPlaces
        self._model = self._adapter = ""  # whose replicas run the lines, and the adapter that these request
        self._spent: Spent
        self._closed: dict[str, tuple[float, float]] = {}  # backends that failed: end and length of the pause
        self._saving = asyncio.Lock()
        self._is_full = False
        self._end = ""  # the status with which it must end
        self._problems: list[Document] = []  # why it fails

    def end(self, status: str = _LOST, problems: list[Document] | None = None) -> None:
        """Abandon the lines in flight and end the batch with a status; without a status, leave it to another run."""
        self._end, self._problems = self._end or status, self._problems or problems or []
        for line in self._tasks.values():
            if (request := self._places.requests.get(line)) is not None:
                request.give_up()

    async def run(self, checking: asyncio.Lock, most_lines: int) -> None:
        """Run the batch; check only one batch at a time."""
        record = await asyncio.to_thread(self._storage.read, self._place.open, BatchRecord)
        if record is None:
            return
        self._record = record
        self._problems = self._problems or (record.errors or {}).get("data", [])  # its end may have failed
        if record.status == "validating" and not self._end:
            async with checking:
                self._problems = await asyncio.to_thread(self._check, most_lines)
        if not (self._end or self._problems):
            await self._run_lines()
        if self._end != _LOST:
            await self._finish("failed" if self._problems else self._end or "completed")

    def _check(self, most_lines: int) -> list[Document]:
        """Check all lines before any of them runs, and return the problems; runs in a thread."""
        try:
            total, model, problems = check(self._input(), self._record.endpoint, most_lines)
            if model and not problems and (key := self._key()) is not None:
                self._gateway.relay.router.find(model, key, self._record.endpoint)
        except FileNotFoundError:
            return [_gone()]
        except GatewayError as error:
            return [problem(error.code or "", error.message, 1, error.param)]
        self._record.model, self._record.request_counts["total"] = model, total
        return problems

    def _key(self) -> Client | None:
        return self._gateway.relay.access.keyring.with_id(self._place.owner)

    async def _save_record(self) -> None:
        async with self._saving:  # the last write is the newest state
            if self._record.status not in ENDED:
                await asyncio.to_thread(self._storage.write, self._place.open, self._record)

    async def save(self) -> None:
        """Write its progress; while that fails, no line begins."""
        try:
            if self._waiting or self._tasks:
                await self._save_record()
                await asyncio.to_thread(self._storage.write, f"spent/{self._place.owner}", self._spent)
                await asyncio.to_thread(self._storage.check_room)
            self._is_full = False
        except OSError as error:
            self._is_full = True
            background.note("batches", error, of=self._place.id, then="; no line begins until it succeeds")

    # Lines

    def _input(self) -> Iterator[bytes]:
        path = f"{self._place.owner}/files/{self._record.input_file_id}"
        return in_turns(self._storage.lines(path, MOST_LINE_BYTES))

    def _pending(self) -> Iterator[Line]:
        """Yield the lines without an answer."""
        for number, raw in enumerate(self._input()):
            if raw.strip() and number not in self._notes.answered:
                line = read_line(number, raw)
                line.runs = self._notes.runs.get(number, 0)
                yield line

    async def _run_lines(self) -> None:
        kinds = await asyncio.to_thread(lambda: [kind for kind, _ in self._notes.answers()])
        completed = kinds.count(COMPLETED)
        self._record.request_counts |= {"completed": completed, "failed": len(kinds) - completed}
        spent = await asyncio.to_thread(self._storage.read, f"spent/{self._place.owner}", Spent)
        self._spent = spent or Spent()
        self._model, self._adapter = _model_of(self._gateway, self._record, self._key())
        self._places = self._places_of(self._model)
        self._record.enter("in_progress")
        await self._save_record()
        pending = self._pending()
        while not self._end:
            lines = await self._next(pending)
            if not (lines or self._waiting or self._tasks):
                break
            if not any(self._begin(line) for line in lines):
                await self._places.wait()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.to_thread(self._storage.write, f"spent/{self._place.owner}", self._spent)

    async def _next(self, pending: Iterator[Line]) -> list[Line]:
        """Return the lines that may be sent next: one that must not be given up again, and another one."""
        now_s = time.monotonic()
        due = [line for line in self._waiting if line.not_before_s <= now_s]
        must_end, others = ([line for line in due if line.must_end is must][:1] for must in (True, False))
        if not others:
            held = [*self._waiting, *self._tasks.values()]
            if len(held) < _MOST_HELD and sum(len(line.body) for line in held) <= _MOST_HELD_BYTES:
                try:
                    line = await asyncio.to_thread(next, pending, None)
                except FileNotFoundError:
                    self.end("failed", [_gone()])
                    return []
                others = [] if line is None else [line]
                self._waiting += others
        return must_end + others

    def _begin(self, line: Line) -> bool:
        """Run a line if replicas and its key's limits have a place for it; return whether they do."""
        key, closed, lines = self._key(), self._closed_now(), len(self._tasks)
        if line.error is None and line.runs >= _MOST_RUNS:
            text = f"This line was begun {_MOST_RUNS} times, and not answered; the gateway's log tells more."
            line.error = GatewayError(500, text, code="no_answer")
        if key is None:
            return False
        if line.error is None:
            if self._is_full or _GATEWAY in closed or self._places.closed_to(line, closed) is None:
                return False
            settings = settings_of(self._gateway, key)
            if not self._spent.has_left(lines, None if settings is None else settings.batch_tokens_per_day):
                return False
            if not self._gateway.relay.limits.enter_line(key, self._spent.ahead(lines)):
                return False
            self._places.requests[line] = None
        self._waiting.remove(line)
        task = background.start("batches", self._run_line(line, key), of=self._place.id)
        self._tasks[task] = line
        task.add_done_callback(self._tasks.pop)
        return True

    async def _run_line(self, line: Line, key: Client) -> None:
        """Send a line, and write its answer or its error; otherwise keep it, to be sent again."""
        answer, pause_s = None, None
        try:
            if line.error is None:
                answer = await self._send(line, key)
                pause_s = 0.0 if answer is None else self._pause_s(line, answer)
            if pause_s is None:
                return await self._write(line, answer)
        except Exception as error:  # noqa: BLE001 -- must not affect other lines
            background.note("batches", error, of=f"{self._place.id}, line {line.number + 1}")
            pause_s, line.runs = _LONGEST_S, line.runs + 1
        line.not_before_s = time.monotonic() + pause_s
        return self._waiting.append(line)

    async def _send(self, line: Line, key: Client) -> Answer | None:
        """Record that a line is sent, and send it; return None if its place is gone or it was abandoned."""
        relay, places, runs, answer, tokens = self._gateway.relay, self._places, line.runs, None, 0

        def sent(backend: str) -> bool:
            line.runs, line.backend = line.runs + 1, backend
            places.sent(line, backend)
            return line.runs < _MOST_RUNS

        try:
            await self._notes.add(RUNS, line.number, b"%d" % (runs + 1))
            closed, began_s = places.closed_to(line, self._closed_now()), time.monotonic()
            if closed is not None and not self._end:
                request = LineRequest(relay, client_of_lines(key), self._record.endpoint, line.body, sent)
                places.requests[line] = request
                answer = await request.answer(closed)
                tokens = request.tokens
            if answer is not None and answer.is_final and answer.backend:
                places.at[answer.backend].answered(time.monotonic() - began_s)
        finally:
            relay.limits.leave_line(key, tokens)
            self._spent.add(tokens)
            places.leave(line)
        if answer is None or answer.is_refusal:
            line.runs = runs
            await self._notes.add(RUNS, line.number, b"%d" % runs)
        return answer

    def _pause_s(self, line: Line, answer: Answer) -> float | None:
        """Return the seconds after which to resend a line; None if the answer is final."""
        if answer.is_final:
            self._closed.pop(answer.backend, None)
            self._closed.pop(_GATEWAY, None)
            return None
        backend = answer.backend if answer.is_refusal else line.backend
        until_s, closed_s = self._closed.get(backend, (0.0, _PAUSE_S / 2.0))
        if (now_s := time.monotonic()) >= until_s:  # several lines that fail at once count as one
            closed_s = min(_LONGEST_CLOSED_S, 2.0 * closed_s)
            self._closed[backend] = now_s + closed_s, closed_s
        line.refused += answer.is_refusal
        tries, most = (line.refused, _MOST_REFUSALS) if answer.is_refusal else (line.runs, _MOST_RUNS)
        return min(_LONGEST_S, _PAUSE_S * 4.0 ** (tries - 1)) if tries < most else None

    def _closed_now(self) -> list[str]:
        """Return the backends that failed recently, and those without the adapter that the lines request."""
        failed = [name for name, (until_s, _) in self._closed.items() if time.monotonic() < until_s]
        members = self._gateway.pool.of(self._model) if self._adapter else ()
        return failed + [each.name for each in members if self._adapter not in each.engine.said.adapters]

    async def _write(self, line: Line, answer: Answer | None) -> None:
        """Write the answer of a line, or why there is none."""
        if answer is not None and answer.status:
            document = await asyncio.to_thread(lambda: written(line.custom_id, answer.document()))
        else:
            error = line.error or GatewayError(500, "The answer broke off each time.", code="no_answer")
            document = written(line.custom_id, None, error.code or "", error.message)
        is_completed = answer is not None and 200 <= answer.status < 300
        await self._notes.add(COMPLETED if is_completed else FAILED, line.number, document)
        outcome = "completed" if is_completed else "failed"
        self._record.request_counts[outcome] += 1
        self._gateway.metrics.counter("gateway_batch_lines").labels(self._model, outcome).inc()

    # The end

    async def _finish(self, status: str) -> None:
        """Turn the notes into the output, and end."""
        record, place, counts = self._record, self._place, self._record.request_counts
        if self._problems:
            record.errors = {"object": "list", "data": self._problems}
        record.enter("finalizing")
        await self._save_record()
        record.output_file_id = await asyncio.to_thread(self._keep, "output", COMPLETED, status)
        record.error_file_id = await asyncio.to_thread(self._keep, "error", FAILED, status)
        if status == "expired":
            counts["failed"] = counts["total"] - counts["completed"]
        cancel = await asyncio.to_thread(self._storage.read, f"{place.open}.cancel", dict)
        record.cancelling_at = None if cancel is None else cancel.get("cancelling_at")
        async with self._saving:
            record.enter(status)
            await asyncio.to_thread(self._storage.write, place.ended, record)
            await asyncio.to_thread(self._storage.remove, *(f"{place.open}{of}" for of in ("", ".cancel", ".notes")))

    def _keep(self, name: str, kind: bytes, status: str) -> str | None:
        """Write a file of the lines that succeeded, or of those that failed; return its id, or None without lines."""
        file_id = f"file-{self._place.id.removeprefix('batch_')}-{name}"
        size_bytes, lines = (self._output(kind, is_expired=status == "expired") for _ in range(2))
        record = FileRecord(file_id, f"{self._place.id}_{name}.jsonl", "batch_output", sum(map(len, size_bytes)))
        if not record.bytes:
            return None
        self._storage.write(f"{self._place.owner}/files/{file_id}", record, lines)
        return file_id

    def _output(self, kind: bytes, *, is_expired: bool) -> Iterator[bytes]:
        for each, document in self._notes.answers():
            if each == kind:
                yield document + b"\n"
        with contextlib.suppress(FileNotFoundError):
            for line in self._pending() if is_expired and kind == FAILED else ():
                text = "This request was not executed before the completion window expired."
                yield written(line.custom_id, None, "batch_expired", text) + b"\n"


def _gone() -> Document:
    return problem("file_not_found", "The input file is gone.")


def _model_of(gateway: Gateway, record: BatchRecord, key: Client | None) -> tuple[str, str]:
    """Return the model whose replicas run the lines of a batch, and the adapter that they request, if any."""
    name = record.model or next(iter(gateway.models))  # without a model, all lines fail
    with contextlib.suppress(GatewayError):  # it is gone, and may come back
        if key is not None:
            model, adapter = gateway.relay.router.find(name, key, record.endpoint)
            return model.name, adapter
    return name, ""
