"""One batch from its validation to its output.

Each line is noted before it is sent, and each answer as it comes. Whoever goes on after a crash reads the notes, and
runs the lines without an answer. The output is made of them at the end: it has one answer of each line.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from backends import background
from gateway.dialects.errors import GatewayError
from gateway.rooms.batches.line_request import Answer, LineRequest, client_of_lines
from gateway.rooms.batches.lines import MOST_LINE_BYTES, Line, check, in_turns, problem, read_line, written
from gateway.rooms.batches.notes import BEGUN, COMPLETED, FAILED, RETURNED, Notes, Spending
from gateway.rooms.batches.places import ModelPlaces
from gateway.rooms.batches.records import ENDED, Marker, keep_file
from gateway.rooms.batches.storage import Document, Storage
from gateway.routing.keys import Client

if TYPE_CHECKING:
    from gateway.config.settings.keys import KeySettings
    from gateway.gateway import Gateway

_LOST: Final = "lost"
"""What a run ends with that another one goes on with."""
_MOST_RUNS, _MOST_REFUSALS = 3, 20
_MOST_HELD, _MOST_HELD_BYTES = 1000, 64 << 20
"""Lines, and bytes of their bodies, above which none are read; a single line may be larger."""
_PAUSE_S, _LONGEST_S, _LONGEST_CLOSED_S = 0.5, 300.0, 60.0
_GATEWAY: Final = ""
"""Stands for the gateway among the names of backends."""


def settings_of(gateway: Gateway, client: Client) -> KeySettings | None:
    """Return the settings of a client's key as they are now; None if it has none."""
    return next((key for key in gateway.settings.keys if key.name == client.name), None)


class BatchRun:
    """A batch that this gateway runs."""

    def __init__(
        self, gateway: Gateway, storage: Storage, marker: Marker, places_of: Callable[[str], ModelPlaces]
    ) -> None:
        self._gateway = gateway
        self._storage = storage
        self._marker = marker
        self._places_of = places_of
        self._record: Document = {}
        self._notes = Notes(storage, f"{marker.folder}/answers", lambda: self._end == _LOST)
        self._spending = Spending(storage, marker.owner)
        self._lines: dict[asyncio.Task[None], Line] = {}  # that were read and have no answer
        self._saving = asyncio.Lock()
        self._turns = asyncio.Lock(), asyncio.Lock()  # to take a place, for most lines and for those that must end
        self._closed: dict[str, tuple[float, float]] = {}  # backends that failed: until when, and the pause
        self._places: ModelPlaces | None = None
        self._in_flight = 0
        self._is_full = False
        self._ended = asyncio.Event()
        self._end = ""  # the status that it is to end with
        self._problems: list[Document] = []  # why it fails

    def end(self, status: str = _LOST, problems: list[Document] | None = None) -> None:
        """End what is in flight, and then the batch with a status; without one, let others go on with it."""
        self._end, self._problems = self._end or status, self._problems or problems or []
        self._ended.set()
        for line in self._lines.values():
            if self._places is not None and (request := self._places.requests.get(line)) is not None:
                request.give_up()

    async def run(self, checking: asyncio.Lock, most_lines: int) -> None:
        """Run the batch; one at a time is checked."""
        record = await asyncio.to_thread(self._storage.read, f"{self._marker.folder}/batch.json")
        if record is None:
            return
        self._record = record
        if record["status"] not in ENDED:
            if record["status"] == "validating" and not self._end:
                async with checking:
                    self._problems = await asyncio.to_thread(self._check, most_lines)
            if not (self._end or self._problems):
                await self._run_lines()
            if self._end == _LOST:
                return
            await self._finish("failed" if self._problems else self._end or "completed")
        answers = f"{self._marker.folder}/answers"
        await asyncio.to_thread(self._storage.remove, answers, self._marker.cancel_path, self._marker.path)

    def _check(self, most_lines: int) -> list[Document]:
        """Check all lines, before any of them runs, and return what is wrong; in a thread."""
        try:
            found = check(self._input(), self._record["endpoint"], most_lines)
            if found.model and not found.problems and (key := self._key()) is not None:
                self._gateway.relay.router.find(found.model, key, self._record["endpoint"])
        except FileNotFoundError:
            return [problem("file_not_found", "The input file is gone.")]
        except GatewayError as error:
            return [problem(error.code or "", error.message, 1, error.param)]
        self._record["model"], self._record["request_counts"]["total"] = found.model, found.total
        return found.problems

    def _key(self) -> Client | None:
        return self._gateway.relay.access.keyring.with_id(self._marker.owner)

    async def _set(self, status: str, **fields: Any) -> None:
        self._record |= {"status": status, f"{status}_at": int(time.time()), **fields}
        async with self._saving:  # the last write has what is newest
            await asyncio.to_thread(self._storage.write_json, f"{self._marker.folder}/batch.json", {**self._record})

    async def save(self) -> None:
        """Write how far it is; while that fails, no line begins."""
        try:
            if (status := self._record.get("status")) == "in_progress":
                await self._set(status, in_progress_at=self._record["in_progress_at"])
                await asyncio.to_thread(self._spending.save)
                await asyncio.to_thread(self._storage.check_room, 0)
            self._is_full = False
        except OSError as error:
            self._is_full = True
            background.note("batches", error, of=self._marker.batch_id, then="; no line begins until it succeeds")

    # Lines

    def _input(self) -> Iterator[bytes]:
        path = f"{self._marker.owner}/files/{self._marker.file_id}.jsonl"
        return in_turns(self._storage.lines(path, MOST_LINE_BYTES))

    def _pending(self) -> Iterator[Line]:
        """Yield the lines that have no answer."""
        for number, raw in enumerate(self._input()):
            if raw.strip() and number not in self._notes.answered:
                line = read_line(number, raw)
                line.runs = self._notes.runs[number]
                yield line

    def _held_bytes(self) -> int:
        return sum(len(line.body) for line in self._lines.values())

    async def _run_lines(self) -> None:
        kinds = await asyncio.to_thread(lambda: [kind for kind, _ in self._notes.answers()])
        completed = kinds.count(COMPLETED)
        self._record["request_counts"] |= {"completed": completed, "failed": len(kinds) - completed}
        await asyncio.to_thread(self._spending.read)
        await self._set("in_progress", in_progress_at=self._record["in_progress_at"] or int(time.time()))
        model = self._record["model"] or next(iter(self._gateway.models))  # of none, each is an error
        self._places = places = self._places_of(model)
        lines = self._pending()
        while not self._end and (line := await asyncio.to_thread(next, lines, None)) is not None:
            task = background.start("batches", self._run_line(line, places), of=self._marker.batch_id)
            self._lines[task] = line
            task.add_done_callback(self._lines.pop)
            while len(self._lines) >= _MOST_HELD or self._held_bytes() > _MOST_HELD_BYTES:
                await asyncio.wait(self._lines, return_when=asyncio.FIRST_COMPLETED)
        while self._lines:
            await asyncio.wait(self._lines)
        await asyncio.to_thread(self._spending.save)

    async def _run_line(self, line: Line, places: ModelPlaces) -> None:
        """Run a line until its answer is written."""
        pause_s: float | None = 0.0
        while pause_s is not None and not self._end:
            try:
                pause_s = await self._run_once(line, places)
            except Exception as error:  # noqa: BLE001 -- an error of a line is that line's
                background.note("batches", error, of=f"{self._marker.batch_id}, line {line.number + 1}")
                pause_s, line.runs = _LONGEST_S, line.runs + 1
            if pause_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._ended.wait()

    async def _run_once(self, line: Line, places: ModelPlaces) -> float | None:
        """Run a line; return after how many seconds it is to run again, or None once its answer is written."""
        if line.error is None and line.runs >= _MOST_RUNS:
            text = f"This line was begun {_MOST_RUNS} times, and not answered; the gateway's log tells more."
            line.error = GatewayError(500, text, code="no_answer")
        if line.error is not None:
            await self._write(line, FAILED, written(line.custom_id, None, line.error.code or "", line.error.message))
            return None
        key = await self._enter(line, places)
        if key is None:
            return 0.0
        runs = line.runs
        try:
            answer = await self._send(line, key, places)
        finally:
            self._in_flight -= 1
            places.leave(line)
        if answer is None or answer.is_refusal:
            line.runs = runs
            await self._notes.add(RETURNED, line.number)
        pause_s = 0.0 if answer is None else self._pause_s(line, answer)
        if pause_s is not None or answer is None:
            return pause_s
        if answer.status:
            document = await asyncio.to_thread(lambda: written(line.custom_id, answer.document()))
        else:
            document = written(line.custom_id, None, "no_answer", "The answer broke off each time.")
        await self._write(line, COMPLETED if 200 <= answer.status < 300 else FAILED, document)
        return None

    async def _enter(self, line: Line, places: ModelPlaces) -> Client | None:
        """Wait for a place, also among the limits of the key, which is returned; None at the end."""
        limits = self._gateway.relay.limits
        async with self._turns[line.must_end]:
            while not self._end:
                key, closed = self._key(), self._closed_now()
                is_open = key is not None and not self._is_full and _GATEWAY not in closed
                if key is not None and is_open and places.closed_to(line, closed) is not None:
                    settings, lines = settings_of(self._gateway, key), self._in_flight
                    has_left = self._spending.has_left(
                        lines, None if settings is None else settings.batch_tokens_per_day
                    )
                    if has_left and limits.enter_line(key, self._spending.ahead(lines)):
                        self._in_flight += 1
                        places.requests[line] = None
                        return key
                await places.wait()
                if not line.must_end:
                    await asyncio.sleep(0)  # lines that must end come first
        return None

    async def _send(self, line: Line, key: Client, places: ModelPlaces) -> Answer | None:
        """Send a line, once that is noted; None if there is no place any more, or it was given up."""
        relay, path, answer, tokens = self._gateway.relay, self._record["endpoint"], None, 0

        def sent(backend: str) -> bool:
            line.runs, line.backend = line.runs + 1, backend
            places.sent(line, backend)
            return line.runs < _MOST_RUNS

        try:
            await self._notes.add(BEGUN, line.number)
            closed, began_s = places.closed_to(line, self._closed_now()), time.monotonic()
            if closed is not None and not self._end:
                request = LineRequest(relay, client_of_lines(key), path, line.body, sent)
                places.requests[line] = request
                answer = await request.answer(closed)
                tokens = request.tokens
            if answer is not None and answer.is_final and answer.backend:
                places.at[answer.backend].answered(time.monotonic() - began_s)
            return answer
        finally:
            relay.limits.leave_line(key, tokens)
            self._spending.add(tokens)

    def _pause_s(self, line: Line, answer: Answer) -> float | None:
        """Return after how many seconds a line is to be sent again; None if the answer is its answer."""
        if answer.is_final:
            self._closed.pop(answer.backend, None)
            self._closed.pop(_GATEWAY, None)
            return None
        backend = answer.backend if answer.is_refusal else line.backend
        until_s, closed_s = self._closed.get(backend, (0.0, _PAUSE_S / 2.0))
        if (now_s := time.monotonic()) >= until_s:  # of several lines that failed at once, one counts
            closed_s = min(_LONGEST_CLOSED_S, 2.0 * closed_s)
            self._closed[backend] = now_s + closed_s, closed_s
        line.refused += answer.is_refusal
        tries, most = (line.refused, _MOST_REFUSALS) if answer.is_refusal else (line.runs, _MOST_RUNS)
        return min(_LONGEST_S, _PAUSE_S * 4.0 ** (tries - 1)) if tries < most else None

    def _closed_now(self) -> list[str]:
        return [name for name, (until_s, _) in self._closed.items() if time.monotonic() < until_s]

    async def _write(self, line: Line, kind: bytes, document: bytes) -> None:
        """Write the answer of a line."""
        await self._notes.add(kind, line.number, document)
        outcome = "completed" if kind == COMPLETED else "failed"
        self._record["request_counts"][outcome] += 1
        self._gateway.metrics.counter("gateway_batch_lines").labels(self._record["model"], outcome).inc()

    # The end

    async def _finish(self, status: str) -> None:
        """Make the output of the answers, and end."""
        if self._problems:
            return await self._set("failed", errors={"object": "list", "data": self._problems})
        await self._set("finalizing")
        fields = await asyncio.to_thread(self._storage.read, self._marker.cancel_path) or {}
        for name, kind in (("output", COMPLETED), ("error", FAILED)):
            file_id = f"file-{self._marker.batch_id.removeprefix('batch_')}-{name}"
            path, lines = f"{self._marker.owner}/files/{file_id}", self._output(kind, is_expired=status == "expired")
            of = f"{self._marker.batch_id}_{name}.jsonl", "batch_output"
            if await asyncio.to_thread(keep_file, self._storage, path, lines, *of) is not None:
                fields[f"{name}_file_id"] = file_id
        if status == "expired":
            counts = self._record["request_counts"]
            counts["failed"] = counts["total"] - counts["completed"]
        return await self._set(status, **fields)

    def _output(self, kind: bytes, *, is_expired: bool) -> Iterator[bytes]:
        """Yield what is written of the lines that have succeeded, or of those that have not."""
        for each, document in self._notes.answers():
            if each == kind:
                yield document + b"\n"
        for line in self._pending() if is_expired and kind == FAILED else ():
            text = "This request was not executed before the completion window expired."
            yield written(line.custom_id, None, "batch_expired", text) + b"\n"
