"""The room for trouble: it counts failures of requests with rare features."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from backends import background
from backends.backend import Backend
from gateway.gateway import Room
from gateway.relay.observers import EndedExchange, Follower, Observer
from gateway.relay.silence import STALL_GAPS, STALL_S
from gateway.rooms.trouble.answer import is_engines_own, problem_of
from gateway.routing.model import Model
from gateway.routing.routed_request import RoutedRequest
from policies.features.request import RequestFeatures
from policies.features.shape import wants_json
from policies.policy import Decision
from policies.trouble.troubles import TroubleFinding

if TYPE_CHECKING:
    from gateway.gateway import Gateway

log = logging.getLogger(__name__)

_PERIOD_S: Final = 0.5
_MOST_BYTES: Final = 1 << 18
"""Size limit for judging whether an answer is usable."""
_MOST_UNREAD_BYTES: Final = 1 << 22
"""Size limit for answers read per half second; further ones count as good, so that less is found."""
_MOST_LINES: Final = 8
"""Most findings of a model that are logged within a minute: each key may have its own, and they may come and go."""
_FAILURES: Final = frozenset({"status", "error", "garbage"})
"""Kinds of failed attempts that the request may have caused; a broken connection is not one."""


class TroubleRoom(Room):
    """Counts failures, and logs and exports what is found."""

    order = 3

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        self._share = gateway.metrics.gauge("gateway_trouble_share")
        # Findings by model, then name and client.
        self._shown: dict[str, dict[tuple[tuple[str, str, str], str], TroubleFinding]] = {}
        self._logged = background.Seldom()
        self._unread = _Unread()

    def follow(self) -> Mapping[str, Follower]:
        """Follow the requests of models with more than one replica: with one, there is nothing to compare."""
        models = {name: model for name, model in self.gateway.models.items() if len(model.upstreams) > 1}
        return {name: _ModelFollower(model, self._unread) for name, model in models.items()}

    def tick(self) -> None:
        """Log what was found or has ended since the last tick, and update the series."""
        for model_name, model in self.gateway.models.items():
            before = self._shown.get(model_name, {})
            found = {(each.name, each.client): each for each in model.troubles.found}
            for name in before.keys() - found.keys():
                self._share.labels(model_name, *before[name].name).set(0.0)
                self._log(logging.INFO, model_name, f"no longer: {before[name]}")
            for name, each in found.items():
                self._share.labels(model_name, *each.name).set(each.share)
                if name not in before:
                    text = f"{each}; such requests go elsewhere where that is faster"
                    self._log(logging.WARNING, model_name, text)
            self._shown[model_name] = found

    def _log(self, level: int, model_name: str, text: str) -> None:
        line = next((line for line in range(_MOST_LINES) if self._logged.may_say((model_name, line))), None)
        if line is not None:
            rest = "; further ones within a minute only in gateway_trouble_share" if line == _MOST_LINES - 1 else ""
            log.log(level, "%s: %s%s", model_name, text, rest)

    def start(self) -> None:
        """Start to read answers and to look for trouble."""
        self.running = background.keep_running("policies", self._look)

    async def _look(self) -> None:
        while True:
            answers = self._unread.take()
            problems = await asyncio.to_thread(list, map(_Ended.problem, answers))
            for answer, problem in zip(answers, problems, strict=True):
                answer.watch.observe("unusable" if problem else "", answer.lost_s)
            for name, model in [*self.gateway.models.items()]:
                with background.guarded("policies", of=f"the troubles of {name}"):
                    await asyncio.to_thread(model.troubles.refresh)
            await asyncio.sleep(_PERIOD_S)


class _Ended(NamedTuple):
    """An ended answer that is yet to be read."""

    watch: _Watch
    features: RequestFeatures
    parts: list[bytes]
    is_stream: bool
    lost_s: float

    def problem(self) -> str:
        """Return what is wrong with it; empty if it is usable."""
        features, answer = self.features, b"".join(self.parts)
        return problem_of(features.endpoint, features.shape, answer, stream=self.is_stream)


class _Unread:
    """Answers yet to be read, off the event loop, since each takes milliseconds."""

    def __init__(self) -> None:
        self._answers: list[_Ended] = []
        self._bytes = 0

    def add(self, answer: _Ended) -> bool:
        """Add an answer; return whether there was room for it."""
        size_bytes = self._bytes + sum(map(len, answer.parts))
        if size_bytes > _MOST_UNREAD_BYTES:
            return False
        self._answers.append(answer)
        self._bytes = size_bytes
        return True

    def take(self) -> list[_Ended]:
        """Return and remove all answers."""
        answers, self._answers, self._bytes = self._answers, [], 0
        return answers


class _ModelFollower:
    """Follows requests of a model with rare features, except those that choose their backend."""

    def __init__(self, model: Model, unread: _Unread) -> None:
        self._model = model
        self._unread = unread

    def follow(self, routed: RoutedRequest, body: bytes) -> Observer | None:
        """Return an observer of a request that has a shape."""
        if not (shape := routed.shape) or routed.headers.backend or routed.headers.method:
            return None
        is_read = wants_json(shape) and is_engines_own(routed.features, routed.document or {})
        return _Watch(self._model, routed, is_read, self._unread)


class _Watch(Observer):
    """Observes whether one request fails, stalls, or gets an unusable answer."""

    needs_answer = False

    def __init__(self, model: Model, routed: RoutedRequest, is_read: bool, unread: _Unread) -> None:
        self._model = model
        self._unread = unread
        self._routed = routed
        self._is_read = is_read  # whether to keep the answer, to read at its end
        self._parts: list[bytes] = []
        self._bytes = 0
        self._backend: Backend | None = None
        self._sent_s = 0.0
        self._first_s = self._last_s = 0.0  # of the chunks of a stream
        self._chunks = 0
        self._stalled_s = 0.0

    def on_send(self, decision: Decision, candidates: Sequence[Backend]) -> None:
        """Begin an attempt; count one that was rescued."""
        now_s = time.perf_counter()
        if decision.reason == "rescue":  # the stream is resumed elsewhere
            pause_s = now_s - self._last_s
            is_stalled = bool(self._first_s) and pause_s > STALL_S
            self.observe("stalled" if is_stalled else "failed", pause_s if is_stalled else now_s - self._sent_s)
        self._backend, self._sent_s = self._model.upstreams[decision.backend].backend, now_s
        self._first_s, self._chunks = 0.0, 0

    def on_retry(self, kind: str) -> None:
        """Count a failed attempt."""
        self.observe("failed" if kind in _FAILURES else None, time.perf_counter() - self._sent_s)

    def on_chunk(self, data: bytes, now_s: float) -> None:
        """Add up the stalls of the stream."""
        if self._first_s:
            pause_s = now_s - self._last_s
            if pause_s > STALL_S and pause_s * self._chunks > STALL_GAPS * (self._last_s - self._first_s):
                self._stalled_s += pause_s
        else:
            self._first_s = now_s
        self._last_s = now_s
        self._chunks += 1
        if self._is_read:
            self._keep(data)

    def on_answer(self, body: bytes, document: object) -> None:
        """Keep an answer in one piece."""
        if self._is_read:
            self._keep(body)

    def on_end(self, ended: EndedExchange) -> None:
        """Count the request."""
        lost_s = ended.ended_s - self._sent_s
        stalled_s = 0.0 if ended.was_paused else self._stalled_s
        if ended.label == "engine_error":
            self.observe("failed" if ended.status >= 500 or ended.stream is not None else None, lost_s)
        elif stalled_s:
            self.observe("stalled", stalled_s)
        elif ended.label == "ok" and ended.status == 200:
            answer = _Ended(self, self._routed.features, self._parts, ended.stream is not None, lost_s)
            if not self._parts or ended.rescued_from or not self._unread.add(answer):
                self.observe("", lost_s)

    def _keep(self, data: bytes) -> None:
        self._bytes += len(data)
        if self._bytes <= _MOST_BYTES:
            self._parts.append(data)
        else:
            self._is_read = False
            self._parts.clear()

    def observe(self, problem: str | None, lost_s: float) -> None:
        """Count how an attempt ended, unless that says nothing about the request (None)."""
        if problem is not None and self._backend is not None:
            age_s = time.perf_counter() - self._sent_s
            self._model.troubles.observe(self._routed.features, self._backend, problem, lost_s, age_s)
