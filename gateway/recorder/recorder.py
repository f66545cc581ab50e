"""The recorder: a bounded queue on the request path, and the thread that empties it."""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import tempfile
import threading
import time
from collections import deque

from pydantic import SecretStr

from gateway.config.settings import PoolSettings, RecorderSettings
from gateway.recorder.document import Documents, Waiting
from gateway.recorder.files import TraceFiles
from gateway.recorder.hashes import TextHasher
from gateway.recorder.take import FinishedRequest, RequestNotes
from gateway.routing.router import RoutedRequest
from gateway.telemetry.metrics import Metrics
from policies.features.request import TEXT_FEATURES, Endpoint

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_AT_ONCE, _AT_ONCE_BYTES = 32, 1 << 17
"""Records left to the thread, and bytes of their texts, that it makes in one go: about a millisecond's work."""
_KEEP_PROMPT_BYTES = 1 << 14
"""The prompt of a longer body is read again, rather than kept beside it for as long as the answer takes."""

_PAUSE_S = 0.0005
_FRAME_BYTES = 1 << 18
"""Of lines, before they are packed. So much fits a core's own cache, and memory of that size is kept by the allocator:
with four times as much it went back to the kernel and came again, one or two page faults a record."""
_COMPLAIN_S = 60.0
_STOP_S = 10.0


class Recorder:
    """Records requests of one gateway process.

    Attributes
    ----------
    written, dropped
        Records: in a file, and left out since the queue was full.
    unmade, lost
        Those that could not be made on the event loop (a defect); those left out in the thread since the disk took
        none, or, a defect too, since they could not be made.
    written_bytes
        In files, packed.
    """

    def __init__(self, settings: RecorderSettings) -> None:
        self._settings = settings
        self._queue: deque[bytes | Waiting] = deque()
        self._most = settings.queue
        self._most_bytes = int(settings.queue_mib * 2**20)
        self._keeps_text = settings.text != "none"
        self._text_bytes = int(settings.max_text_kib * 1024)
        self._keep_prompt_bytes = min(_KEEP_PROMPT_BYTES, self._text_bytes) if settings.text == "hashes" else 0
        self._entered_bytes = 0  # written on the event loop alone; the next by the thread alone
        self._left_bytes = 0
        self._until_full = 1.0
        self._files = TraceFiles(settings)
        salt = _salt(settings)
        hasher = _hasher(settings, salt)
        quick_hasher = _hasher(settings, salt) if hasher is not None and hasher.is_quick else None
        self._documents = Documents(settings.text, hasher, quick_hasher)
        self._wall_offset_s = _wall_offset_s()
        self._writer: threading.Thread | None = None
        self._awake = threading.Event()
        self._stopping = False
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._oldest_s = 0.0
        self._complained_s = -_COMPLAIN_S
        self._counted = (0, 0, 0, 0)
        self.written = self.dropped = self.lost = self.unmade = self.written_bytes = 0

    # On the request path.

    def take(self, endpoint: Endpoint) -> RequestNotes | None:
        """Return notes to be kept on a request; None if it is not recorded."""
        if endpoint is Endpoint.OTHER:
            return None
        share = self._settings.sample
        if share < 1.0 and random.random() >= share:
            return None
        return RequestNotes([] if self._keeps_text else None, self._text_bytes, self._keep_prompt_bytes)

    def body_wanted(self, routed: RoutedRequest, body: bytes) -> bytes:
        """Return the body of a request if its record needs it, else nothing."""
        wanted = (self._keeps_text and routed.prompt is None) or not routed.model.policy.text_features >= TEXT_FEATURES
        return body if wanted and len(body) <= self._text_bytes else b""

    def add(self, taken: FinishedRequest) -> None:
        """Put the record of a request that has ended into the queue, or drop it if that is full."""
        queue = self._queue
        if len(queue) >= self._most or self._entered_bytes - self._left_bytes > self._most_bytes:
            self.dropped += 1
            return
        try:
            begun = self._documents.begin(taken, self._wall_offset_s)
        except Exception as error:  # noqa: BLE001 -- a record that cannot be made must not fail its request
            self.unmade += 1
            self._complain(f"a request could not be recorded: {error!r}")
            return
        if isinstance(begun, bytes):
            self._entered_bytes += len(begun)
            self._until_full -= len(begun) / _FRAME_BYTES
        else:
            self._entered_bytes += begun.size_bytes
            self._until_full -= 1.0 / _AT_ONCE
        queue.append(begun)
        if self._until_full <= 0.0:
            self._until_full = 1.0
            self._awake.set()

    # Beside it.

    def start(self) -> None:
        """Start the thread."""
        # No daemon: it ends with the main thread, whatever ends that, after it has written what there is.
        self._writer = threading.Thread(target=self._run, name="recorder")
        self._writer.start()

    def stop(self) -> None:
        """Write what is in the queue and end the thread; called when no request is under way any more."""
        self._stopping = True
        self._awake.set()
        if self._writer is not None:
            self._writer.join(_STOP_S)
            if self._writer.is_alive():
                logger.error("recorder: the disk did not take the last records within %g s", _STOP_S)

    def count(self, metrics: Metrics) -> None:
        """Add what happened since the last call to the metrics; on the event loop."""
        self._wall_offset_s = _wall_offset_s()  # the clock may have been set
        now = (self.written, self.dropped, self.failed, self.written_bytes)
        written, dropped, failed, written_bytes = (new - old for new, old in zip(now, self._counted, strict=True))
        self._counted = now
        for result, records in (("written", written), ("dropped", dropped), ("failed", failed)):
            metrics.recorded.labels(result).inc(records)
        metrics.recorded_bytes.labels(self._settings.text).inc(written_bytes)
        metrics.recorder_queue.labels(self._settings.text).set(len(self._queue))

    @property
    def failed(self) -> int:
        """Records that were to be written, and are not."""
        return self.lost + self.unmade

    # In the thread.

    def _run(self) -> None:
        main = threading.main_thread()
        ending = False
        while not ending:
            self._awake.wait(_LOOK_S)
            self._awake.clear()
            ending = self._stopping or not main.is_alive()
            self._empty_queue(0 if ending else _AT_ONCE)
            if self._pending and (ending or self._is_due()):
                self._flush()
            self._files.maintenance()
        self._files.close()

    def _empty_queue(self, least: int) -> None:
        """Write what is in the queue, frame by frame; of what is to be ended, go on while it is `least`."""
        while self._queue:
            waiting = self._take_lines()
            if waiting:
                self._end(waiting)
            if self._pending_bytes >= _FRAME_BYTES or (self._pending and self._is_due()):
                self._flush()
            if waiting:
                time.sleep(_PAUSE_S)  # lets the event loop have the interpreter, which it would else wait 5 ms for
                if len(self._queue) < least:
                    return

    def _take_lines(self) -> list[Waiting]:
        """Take a frame of lines from the queue, or until as many are to be ended as is soon done; return these."""
        waiting: list[Waiting] = []
        waiting_bytes = 0
        while self._queue and self._pending_bytes < _FRAME_BYTES:
            one = self._queue.popleft()
            if isinstance(one, bytes):
                self._left_bytes += len(one)
                self._append(one)
                continue
            self._left_bytes += one.size_bytes
            waiting_bytes += one.size_bytes
            waiting.append(one)
            if len(waiting) >= _AT_ONCE or waiting_bytes >= _AT_ONCE_BYTES:
                break
        return waiting

    def _end(self, waiting: list[Waiting]) -> None:
        try:
            lines = self._documents.end(waiting)
        except Exception as error:  # noqa: BLE001 -- records that cannot be made must not end all others
            self._lose(len(waiting), error)
            return
        for line in lines:
            if isinstance(line, bytes):
                self._append(line)
            else:
                self._lose(1, line)

    def _append(self, line: bytes) -> None:
        if not self._pending:
            self._oldest_s = time.monotonic()
        self._pending.append(line)
        self._pending_bytes += len(line)

    def _lose(self, records: int, error: Exception) -> None:
        self.lost += records
        self._complain(f"a request could not be recorded: {error!r}")

    def _is_due(self) -> bool:
        return time.monotonic() - self._oldest_s >= self._settings.flush_s

    def _flush(self) -> None:
        lines, records = b"".join(self._pending), len(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        try:
            self.written_bytes += self._files.write(lines)
        except OSError as error:
            self.lost += records
            self._complain(f"records are lost: {self._settings.path}: {error.strerror or error}")
        else:
            self.written += records

    def _complain(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._complained_s >= _COMPLAIN_S:
            self._complained_s = now_s
            logger.error("recorder: %s (said once a minute; gateway_recorder_records_total counts them)", text)


def with_salt(settings: PoolSettings) -> PoolSettings:
    """Return the settings with a salt made for the hashes, if they have none: the workers of a gateway share it."""
    recorder = settings.recorder
    if recorder is None or recorder.text != "hashes" or recorder.hash_salt is not None:
        return settings
    made = recorder.model_copy(update={"hash_salt": SecretStr(secrets.token_hex(32))})
    return settings.model_copy(update={"recorder": made})


def _salt(settings: RecorderSettings) -> bytes:
    return settings.hash_salt.get_secret_value().encode() if settings.hash_salt is not None else secrets.token_bytes(32)


def _hasher(settings: RecorderSettings, salt: bytes) -> TextHasher | None:
    if settings.text != "hashes":
        return None
    return TextHasher(salt, settings.hash_ngram, settings.tokenizer)


def recorder_issue(settings: RecorderSettings) -> str:
    """Return what would keep a recorder from writing; empty if nothing would. Creates nothing.

    The folder may not exist yet: then its nearest parent that does must take it.
    """
    folder = settings.path.absolute()
    with contextlib.suppress(OSError):
        while not folder.exists():
            folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
        _hasher(settings, b"")
    except OSError as error:
        return f"recorder.path: {settings.path}: cannot write to {folder}: {error.strerror}"
    except ValueError as error:
        return f"recorder.tokenizer: {error}"
    return ""


def _wall_offset_s() -> float:
    """Return the seconds since 1970 when the clock of `time.perf_counter` showed 0."""
    return time.time() - time.perf_counter()
