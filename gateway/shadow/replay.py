"""The bounded queue of finished texts, the thread that empties it, and the process that does the work."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from gateway.shadow.finished import Finished, Kept
from gateway.telemetry.fallback import Fallback
from gateway.telemetry.metrics import Metrics
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.shadow_drafting import ShadowArm, ShadowSettings
from policies.policy import Outcome, Policy

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_AGAIN_S = 30.0
_LONGEST_PAUSE_S = 10.0
_FEWEST_TOKENS = 8
_TEXTS = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.MESSAGES, Endpoint.RESPONSES})


_COMMAND = (sys.executable, "-P", "-m", "gateway.shadow")


def _environment() -> dict[str, str]:
    """Return that of a process which imports what this one did, and not what the working directory calls `gateway`."""
    here = str(Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}


class ShadowDrafting:
    """Replays what was finished with one model.

    Attributes
    ----------
    replayed, dropped, failed
        Texts: replayed, left out since too much waited, and those of which nothing could be made.
    cpu_s
        What replaying took.
    """

    def __init__(self, policy: Policy, settings: ShadowSettings, arms: Sequence[ShadowArm]) -> None:
        self._policy = policy
        self._settings = settings
        self._most = settings.queue
        self._arms = orjson.dumps([{**dataclasses.asdict(arm), "config": dict(arm.config)} for arm in arms])
        self._text_bytes = int(1024 * settings.max_text_kib)
        self._most_bytes = int(2**20 * settings.queue_mib)
        self._queue: deque[Finished] = deque()
        self._results: deque[Outcome] = deque()
        self._entered_bytes = 0  # written on the event loop alone; the next by the thread alone
        self._left_bytes = 0
        self._awake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._again_s = 0.0
        self.replayed = self.dropped = self.failed = 0
        self.cpu_s = 0.0
        self._counted = (0, 0, 0, 0.0)

    def start(self) -> None:
        """Start the thread and its process, which has made itself ready when the first text has ended."""
        self._thread = threading.Thread(target=self._run, name="shadow", daemon=True)
        self._thread.start()

    # On the event loop.

    @property
    def waiting(self) -> int:
        """Texts in the queue."""
        return len(self._queue)

    def begin(self, features: RequestFeatures, body: bytes) -> Kept | None:
        """Return where to keep the answer of a request; None if it is not to be replayed."""
        if features.endpoint not in _TEXTS or features.n != 1 or len(body) > self._text_bytes:
            return None
        sample = self._settings.sample
        if sample < 1.0 and random.random() >= sample:
            return None
        if len(self._queue) >= self._most:  # at a rate at which most are left out, they are spared the keeping too
            self.dropped += 1
            return None
        return Kept(self._text_bytes)

    def add(self, outcome: Outcome, body: bytes, kept: Kept, *, streamed: bool) -> None:
        """Put a request that has ended into the queue, or leave it out if too much waits."""
        if not kept.parts or outcome.output_tokens < _FEWEST_TOKENS:
            return
        if len(self._queue) >= self._most or self._entered_bytes - self._left_bytes > self._most_bytes:
            self.dropped += 1
            return
        size = len(body) + self._text_bytes - kept.room
        self._entered_bytes += size
        self._queue.append(Finished(outcome, body, kept.parts, streamed, size))
        if len(self._queue) == 1:
            self._awake.set()

    def deliver(self, fallback: Fallback) -> None:
        """Let the policy observe what was found out; called every half second."""
        while self._results:
            outcome = self._results.popleft()
            try:
                self._policy.observe_shadow(outcome)
            except Exception as error:  # noqa: BLE001 -- what else is due twice a second must go on
                fallback.note(self._policy.name, "observe_shadow", error)

    def count(self, metrics: Metrics, model: str) -> None:
        """Add what happened since the last call to the metrics."""
        now = (self.replayed, self.dropped, self.failed, self.cpu_s)
        since = [new - old for new, old in zip(now, self._counted, strict=True)]
        self._counted = now
        for result, texts in zip(("replayed", "dropped", "failed"), since, strict=False):
            metrics.shadow.labels(model, result).inc(texts)
        metrics.lookup_cpu.labels(model).inc(since[-1])

    def stop(self) -> None:
        """End the thread and its process; what still waits is not replayed."""
        self._stopping.set()
        self._awake.set()
        if (process := self._process) is not None:
            process.kill()  # it holds nothing that would be lost, and may be at something that takes long
        if self._thread is not None:
            self._thread.join()

    # In the thread.

    def _run(self) -> None:
        try:
            self._begin_process()
        except OSError as error:
            self._put_off(error)
        try:
            while not self._stopping.is_set():
                try:
                    finished = self._queue.popleft()
                except IndexError:
                    self._awake.wait(_LOOK_S)
                    self._awake.clear()
                    continue
                self._left_bytes += finished.size_bytes
                pause_s = self._replay(finished)
                self._stopping.wait(pause_s)
        finally:
            self._end_process()

    def _replay(self, finished: Finished) -> float:
        """Have a text replayed, and return how long to pause so that no more than its share of a core is taken."""
        try:
            told = self._ask(finished)
        except (OSError, ValueError) as error:  # it was killed, or could not be started
            self._end_process()
            self.failed += 1
            self._put_off(error)
            return 0.0
        if told is None:
            return 0.0
        cpu_s: float = told["cpu_s"]
        self.cpu_s += cpu_s
        if "error" in told:
            self.failed += 1
            log.debug("a text could not be replayed: %s", told["error"])
        else:
            self.replayed += 1
            if shadow := told["tokens_per_step"]:
                self._results.append(dataclasses.replace(finished.outcome, shadow=shadow))
        return min(_LONGEST_PAUSE_S, cpu_s / self._settings.cpu - cpu_s)

    def _ask(self, finished: Finished) -> dict[str, Any] | None:
        if self._process is None and time.monotonic() < self._again_s:
            self.failed += 1
            return None
        process = self._process or self._begin_process()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b"".join(finished.answer)
        head = b'{"endpoint":"%b","streamed":%b,"body":%d,"answer":%d}\n' % (
            finished.outcome.request.endpoint.value.encode(),
            b"true" if finished.streamed else b"false",
            len(finished.body),
            len(answer),
        )
        process.stdin.write(head + finished.body + answer)
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise OSError(f"its process ended with status {process.poll()}")
        return orjson.loads(line)  # type: ignore[no-any-return]

    def _begin_process(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment())  # noqa: S603
        self._process = process  # where `stop` finds it, unless it looked before
        if self._stopping.is_set():
            process.kill()
        assert process.stdin is not None
        process.stdin.write(self._arms + b"\n")
        process.stdin.flush()
        return process

    def _put_off(self, error: Exception) -> None:
        """Say that the process is not to be had, unless that is since all is to end."""
        if not self._stopping.is_set():
            self._again_s = time.monotonic() + _AGAIN_S
            log.warning("lookups cannot be replayed: %s; trying again in %g s", error, _AGAIN_S)

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what it had not read yet goes nowhere
                    pipe.close()
