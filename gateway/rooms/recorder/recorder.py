"""The recorder: a bounded queue filled by the request path, and the thread that empties it."""

from __future__ import annotations

import contextlib
import logging
import random
import tempfile
import threading
import time
from collections import deque

from backends import background
from backends.background import Seldom
from backends.validation import UsageError
from gateway.relay.observers import EndedExchange
from gateway.rooms.recorder.document import RecordBuilder, RequestNotes
from gateway.rooms.recorder.files import TraceFiles
from gateway.rooms.recorder.hashes import TextHasher
from gateway.rooms.recorder.settings import RecorderSettings
from gateway.routing.routed_request import RoutedRequest
from gateway.telemetry.log_format import place_of
from gateway.telemetry.registry import Registry
from policies.features.request import TEXT_FEATURES

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_BATCH, _BATCH_BYTES = 32, 1 << 17
"""Records that the thread completes without a pause, and the bytes of their texts: about a millisecond of work."""
_KEEP_PROMPT_BYTES = 1 << 14
"""Size of the largest body whose prompt is kept in memory during the request; a longer body is parsed again."""

_PAUSE_S = 0.0005
_FRAME_BYTES = 1 << 18
"""Uncompressed bytes per frame. This size fits a core's own cache, and the allocator keeps the memory: at four times
the size it returned the memory to the kernel each time, which cost one or two page faults per record."""
_STOP_S = 10.0


class Recorder:
    """Records the requests of one gateway process."""

    def __init__(self, settings: RecorderSettings) -> None:
        self._settings = settings
        self._queue: deque[bytes | RequestNotes] = deque()
        self._max_records = settings.queue
        self._max_bytes = int(settings.queue_mib * 2**20)
        self._keeps_text = settings.text != "none"
        self._text_bytes = int(settings.max_text_kib * 1024)
        # Size of the largest body whose prompt is worth keeping until the request has ended.
        self.keep_prompt_bytes = min(_KEEP_PROMPT_BYTES, self._text_bytes) if settings.text == "hashes" else 0
        self._entered_bytes = 0  # put into the queue, counted only by the event loop
        self._left_bytes = 0  # taken out of the queue, counted only by the thread
        self._until_full = 1.0  # share of a frame or batch still missing in the queue
        self._files = TraceFiles(settings)
        salted = settings.salted()
        hasher = _hasher(salted)
        quick_hasher = _hasher(salted) if hasher is not None and hasher.is_quick else None
        self._builder = RecordBuilder(settings.text, hasher, quick_hasher)
        self._wall_offset_s = _wall_offset_s()
        self._writer: threading.Thread | None = None
        self._awake = threading.Event()
        self._stopping = False
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._oldest_s = 0.0
        self._logged = Seldom()
        self._counted = (0, 0, 0)
        self._failed_on_loop = self._failed_in_thread = 0  # each counted by one thread only
        self.written = self.dropped = 0

    # On the request path

    def follow(self, routed: RoutedRequest, body: bytes) -> RequestNotes | None:
        """Return notes for a request; None if it is not recorded."""
        share = self._settings.sample
        if share < 1.0 and random.random() >= share:
            return None
        needed = (self._keeps_text and routed.prompt is None) or not routed.model.policy.text_features >= TEXT_FEATURES
        kept = body if needed and len(body) <= self._text_bytes else b""
        return RequestNotes(self.add, kept, keeps_answer=self._keeps_text, max_bytes=self._text_bytes)

    def add(self, notes: RequestNotes, ended: EndedExchange) -> None:
        """Append the record of a finished request to the queue, or drop it if the queue is full."""
        queue = self._queue
        if len(queue) >= self._max_records or self._entered_bytes - self._left_bytes > self._max_bytes:
            self.dropped += 1
            return
        try:
            line = self._builder.begin(notes, ended, self._wall_offset_s)
        except Exception as error:  # noqa: BLE001 -- a defect in recording must not fail the request
            self._failed_on_loop += 1
            self._log_error(f"a request could not be recorded: {place_of(error)}")
            return
        if line is not None:
            self._entered_bytes += len(line)
            self._until_full -= len(line) / _FRAME_BYTES
            queue.append(line)
        else:
            self._entered_bytes += notes.size_bytes
            self._until_full -= 1.0 / _BATCH
            queue.append(notes)
        if self._until_full <= 0.0:
            self._until_full = 1.0
            self._awake.set()

    # Control

    def start(self) -> None:
        """Start the thread."""
        # Not a daemon thread: it writes the rest of the queue however the main thread ends.
        self._writer = threading.Thread(target=self._run, name="recorder")
        self._writer.start()

    def stop(self) -> None:
        """Write the rest of the queue and end the thread; called when no request is in flight."""
        self._stopping = True
        self._awake.set()
        if self._writer is not None:
            self._writer.join(_STOP_S)
            if self._writer.is_alive():
                logger.error("recorder: the last records could not be written within %g s", _STOP_S)

    def count(self, registry: Registry) -> None:
        """Add the changes since the last call to the series; runs on the event loop."""
        self._wall_offset_s = _wall_offset_s()  # the system time may have been changed
        records = registry.counter("gateway_recorder_records")
        now = (self.written, self.dropped, self.failed)
        for result, new, old in zip(("written", "dropped", "failed"), now, self._counted, strict=True):
            records.labels(result).inc(new - old)
        self._counted = now

    @property
    def failed(self) -> int:
        """Records that could not be built or written."""
        return self._failed_on_loop + self._failed_in_thread

    # In the thread

    def _run(self) -> None:
        main = threading.main_thread()
        ending = False
        while not ending:
            self._awake.wait(_POLL_S)
            self._awake.clear()
            ending = self._stopping or not main.is_alive()
            with background.guarded("recorder"):
                self._empty_queue(0 if ending else _BATCH)
                if self._pending and (ending or self._is_due()):
                    self._flush()
                self._files.maintenance()
        self._files.close()

    def _empty_queue(self, min_records: int) -> None:
        """Write the queue in frames; after a batch of pending records, stop if fewer than `min_records` are queued."""
        while self._queue:
            completed = self._take_batch()
            if self._pending_bytes >= _FRAME_BYTES or (self._pending and self._is_due()):
                self._flush()
            if completed:
                time.sleep(_PAUSE_S)  # releases the GIL, for which the event loop would otherwise wait 5 ms
                if len(self._queue) < min_records:
                    return

    def _take_batch(self) -> int:
        """Move lines to the frame, until it or a batch of pending records is full; return how many were pending."""
        completed = completed_bytes = 0
        while (
            self._queue and self._pending_bytes < _FRAME_BYTES and completed < _BATCH and completed_bytes < _BATCH_BYTES
        ):
            record = self._queue.popleft()
            if isinstance(record, bytes):
                self._left_bytes += len(record)
                self._append(record)
                continue
            size_bytes = record.size_bytes
            self._left_bytes += size_bytes
            completed, completed_bytes = completed + 1, completed_bytes + size_bytes
            try:
                self._append(self._builder.end(record))
            except Exception as error:  # noqa: BLE001 -- a defect in one record must not affect the others
                self._failed_in_thread += 1
                self._log_error(f"a request could not be recorded: {place_of(error)}")
        return completed

    def _append(self, line: bytes) -> None:
        if not self._pending:
            self._oldest_s = time.monotonic()
        self._pending.append(line)
        self._pending_bytes += len(line)

    def _is_due(self) -> bool:
        return time.monotonic() - self._oldest_s >= self._settings.flush_s

    def _flush(self) -> None:
        lines, records = b"".join(self._pending), len(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        try:
            self._files.write(lines)
        except OSError as error:
            self._failed_in_thread += records
            self._log_error(f"records are lost: {self._settings.path}: {error.strerror or error}")
        else:
            self.written += records

    def _log_error(self, message: str) -> None:
        if self._logged.may_say():
            logger.error("recorder: %s (logged once a minute; gateway_recorder_records_total counts them)", message)


def _hasher(settings: RecorderSettings) -> TextHasher | None:
    salt = settings.hash_salt
    if settings.text != "hashes" or salt is None:
        return None
    try:
        return TextHasher(salt.get_secret_value().encode(), settings.tokenizer)
    except ValueError as error:
        raise UsageError(f"recorder.tokenizer: {error}") from None


def recorder_issue(settings: RecorderSettings) -> str:
    """Return why a recorder with these settings could not write; empty if it could. Creates nothing.

    If the folder does not exist, its nearest existing parent must be writable.
    """
    folder = settings.path.absolute()
    with contextlib.suppress(OSError):
        while not folder.exists():
            folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
        _hasher(settings.salted())
    except OSError as error:
        return f"recorder.path: {settings.path}: cannot write to {folder}: {error.strerror}"
    except UsageError as error:
        return str(error)
    return ""


def _wall_offset_s() -> float:
    """Return the seconds since 1970 at which `time.perf_counter` was 0."""
    return time.time() - time.perf_counter()
