"""Pickers that are busy, and pickers that die."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.picker_envoy.conftest import Stage
from tests.support.command import until

pytestmark = pytest.mark.slow


def test_an_answer_waits_for_a_picker_that_is_busy(stage: Stage) -> None:
    """Envoy fails it after 200 ms, if it is not told otherwise."""
    group = stage.pickers[0].process.pid
    seen = len(stage.engines["a"].seen)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(stage.chat, "when told", headers={"x-gateway-backend": "a"})
        until(lambda: len(stage.engines["a"].seen) > seen)
        os.killpg(group, signal.SIGSTOP)
        try:
            stage.tell_engines()
            with pytest.raises(TimeoutError):
                answer.result(1.0)
        finally:
            os.killpg(group, signal.SIGCONT)
        assert answer.result().status_code == httpx.codes.OK


def test_the_second_picker_takes_over_from_one_that_was_killed(stage: Stage) -> None:
    """Envoy cuts off the answers of the requests that the first had admitted."""
    stage.start(1)
    with stage.stream("endless") as answer:
        os.killpg(stage.pickers[0].process.pid, signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            answer.read()
    stage.stop(0)
    stage.until_known(1)
    until(lambda: stage.chat().status_code == httpx.codes.OK, what="the worker of Envoy knows it too")
    until(lambda: stage.metric("gateway_requests_total", picker=1, outcome="ok") >= 1)


def test_answers_go_on_while_the_picker_stops(stage: Stage) -> None:
    with stage.stream("paused") as answer, ThreadPoolExecutor(1) as threads:
        text = threads.submit(answer.read)
        assert stage.pickers[1].end() == 0
        assert text.result().endswith(b"data: [DONE]\n\n")
    stage.stop(1)
    stage.until_known(0)


def test_without_a_picker_requests_are_refused(stage: Stage) -> None:
    answer = stage.chat()
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        503,
        "No endpoint picker answers. Try again shortly.",
    )


def test_a_picker_that_comes_back_is_asked_again(stage: Stage) -> None:
    stage.start(0)
    assert stage.chat(headers={"x-gateway-backend": "b"}).headers["x-gateway-backend"] == "b"
    until(lambda: stage.metric("gateway_requests_total", outcome="ok") == 1)
