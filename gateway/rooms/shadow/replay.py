"""Collects the texts of finished requests, and runs the thread and the process that replay drafting on them."""

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import orjson

from backends import background
from gateway.relay.observers import EndedExchange, Observer
from gateway.routing.routed_request import RoutedRequest
from policies.features.request import Endpoint
from policies.learned.shadow_drafting import ShadowArm, ShadowSettings
from policies.policy import Outcome
from policies.roles import Learner

log = logging.getLogger(__name__)

MOST_TEXTS: Final = 256
"""Most finished texts that wait for replay; further ones are skipped."""
_MOST_QUEUED_BYTES: Final = 64 * 2**20
MOST_TEXT_BYTES: Final = 2**20
"""Size of a request or an answer, with 200 bytes per streamed chunk, above which it is skipped."""

_IDLE_WAIT_S = 0.1
_RESTART_DELAY_S = 30.0
_MAX_PAUSE_S = 10.0
_MIN_TOKENS: Final = 8
_TEXTS: Final = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.MESSAGES, Endpoint.RESPONSES})
_COMMAND = (sys.executable, "-P", "-m", "gateway.rooms.shadow")


def _environment() -> dict[str, str]:
    """Return the environment in which the process imports this package, not one in the working directory."""
    root = str(Path(__file__).parents[3])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


def _encoded(arms: Sequence[ShadowArm]) -> bytes:
    return orjson.dumps([{**dataclasses.asdict(arm), "config": dict(arm.config)} for arm in arms])


class AnswerText(Observer):
    """Collects the bytes of an answer, up to a limit.

    Examples
    --------
    >>> text = AnswerText(print, b"{}", room=4)
    >>> text.on_chunk(b"abc", 1.0)
    >>> text.parts, text.size_bytes
    ([b'abc'], 5)
    >>> text.on_chunk(b"de", 2.0)
    >>> text.parts
    []
    """

    needs_answer: ClassVar[bool] = False
    outcome: Outcome  # of the request; unset before its end

    def __init__(self, add: Callable[[AnswerText], None], body: bytes, room: int) -> None:
        self._add = add  # called with the complete text if the request succeeds
        self._room = room  # largest answer in bytes
        self.body = body
        self.size_bytes = len(body)
        self.parts: list[bytes] = []  # parts of the answer; empty if it was too long
        self.streamed = False  # whether the answer is a stream of events

    def on_chunk(self, data: bytes, now_s: float) -> None:
        """Add a part of a stream."""
        self.streamed = True
        self.on_answer(data, None)

    def on_answer(self, body: bytes, document: object) -> None:
        """Add a part of the answer."""
        self._room -= len(body)
        self.size_bytes += len(body)
        if self._room < 0:
            self.parts.clear()
        else:
            self.parts.append(body)

    def on_end(self, ended: EndedExchange) -> None:
        """Pass on the text of a request that succeeded."""
        outcome = ended.outcome
        if outcome is not None and self.parts and ended.label == "ok" and ended.status == 200:
            self.outcome = outcome
            self._add(self)


class ShadowDrafting:
    """Replays drafting on the finished texts of one model."""

    def __init__(self, policy: Learner, settings: ShadowSettings, arms: Sequence[ShadowArm]) -> None:
        self._policy = policy
        self._settings = settings
        self._arms = _encoded(arms)
        self._queue: deque[AnswerText] = deque()
        self._results: deque[Outcome] = deque()
        # Two counters with one writer each, the event loop and the thread. Their difference is in the queue.
        self._entered_bytes = 0
        self._left_bytes = 0
        self._awake = threading.Event()
        self._stopping = threading.Event()
        self._drafting: threading.Thread | None = None  # when compiled, `_thread` would be `__thread`, a gcc keyword
        self._process: subprocess.Popen[bytes] | None = None
        self._restart_at_s = 0.0

    def replays(self, policy: Learner, arms: Sequence[ShadowArm]) -> bool:
        """Return whether it replays these arms for this policy."""
        return policy is self._policy and _encoded(arms) == self._arms

    def start(self) -> None:
        """Start the thread and its process, which loads while the first requests run."""
        self._drafting = threading.Thread(target=self._run, name="shadow", daemon=True)
        self._drafting.start()

    # On the event loop.

    def follow(self, routed: RoutedRequest, body: bytes) -> AnswerText | None:
        """Return an observer that collects the answer; None if the request is not replayed."""
        features = routed.features
        if features.endpoint not in _TEXTS or features.n != 1 or len(body) > MOST_TEXT_BYTES:
            return None
        sample = self._settings.sample
        if sample < 1.0 and random.random() >= sample:
            return None
        if len(self._queue) >= MOST_TEXTS:  # saves collecting an answer that would probably be dropped
            return None
        return AnswerText(self.add, body, MOST_TEXT_BYTES)

    def add(self, text: AnswerText) -> None:
        """Queue a complete text, or drop it if the queue is full."""
        if text.outcome.output_tokens < _MIN_TOKENS:
            return
        if len(self._queue) >= MOST_TEXTS or self._entered_bytes - self._left_bytes > _MOST_QUEUED_BYTES:
            return
        self._entered_bytes += text.size_bytes
        self._queue.append(text)
        if len(self._queue) == 1:
            self._awake.set()

    def deliver(self, observe: Callable[[Outcome], None]) -> None:
        """Pass results on; called every half second."""
        while self._results:
            observe(self._results.popleft())

    def stop(self) -> None:
        """End the thread and its process; texts in the queue are not replayed."""
        self._stopping.set()
        self._awake.set()
        if (process := self._process) is not None:
            process.kill()  # it holds no state, and a replay may take long
        if self._drafting is not None:
            self._drafting.join()

    # In the thread.

    def _run(self) -> None:
        try:
            self._start_process()
        except OSError as error:
            self._postpone(error)
        try:
            while not self._stopping.is_set():
                try:
                    text = self._queue.popleft()
                except IndexError:
                    self._awake.wait(_IDLE_WAIT_S)
                    self._awake.clear()
                    continue
                self._left_bytes += text.size_bytes
                with background.guarded("shadow drafting"):
                    self._stopping.wait(self._replay(text))
        finally:
            self._end_process()

    def _replay(self, text: AnswerText) -> float:
        """Replay a text, and return the pause in seconds that keeps the process within its share of a core."""
        if self._process is None and time.monotonic() < self._restart_at_s:
            return 0.0
        try:
            result = self._request(text)
        except (OSError, ValueError) as error:  # the process was killed or could not be started
            self._end_process()
            self._postpone(error)
            return 0.0
        cpu_s: float = result["cpu_s"]
        if "error" in result:
            log.debug("a text could not be replayed: %s", result["error"])
        elif tokens_per_step := result["tokens_per_step"]:
            self._results.append(dataclasses.replace(text.outcome, shadow=tokens_per_step))
        return min(_MAX_PAUSE_S, cpu_s / self._settings.cpu - cpu_s)

    def _request(self, text: AnswerText) -> dict[str, Any]:
        process = self._process or self._start_process()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b"".join(text.parts)
        head = b'{"endpoint":"%b","streamed":%b,"body":%d,"answer":%d}\n' % (
            text.outcome.request.endpoint.value.encode(),
            b"true" if text.streamed else b"false",
            len(text.body),
            len(answer),
        )
        process.stdin.write(head + text.body + answer)
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise OSError(f"the process exited with status {process.poll()}")
        return orjson.loads(line)  # type: ignore[no-any-return]

    def _start_process(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment())  # noqa: S603
        self._process = process  # before the check: `stop` may run concurrently
        if self._stopping.is_set():
            process.kill()
        assert process.stdin is not None
        process.stdin.write(self._arms + b"\n")
        process.stdin.flush()
        return process

    def _postpone(self, error: Exception) -> None:
        """Log a failure of the process, and delay its restart; ignored while stopping."""
        if not self._stopping.is_set():
            self._restart_at_s = time.monotonic() + _RESTART_DELAY_S
            log.warning("shadow drafting failed: %s; trying again in %g s", error, _RESTART_DELAY_S)

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unread input is lost with the process
                    pipe.close()
