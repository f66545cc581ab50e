"""Streams that end before their time, and those that only look on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from .data_plane import FULL_DUPLEX, NONE, Stream, StreamEndedError
from .requirement import Source, must, should
from .target import Target
from .test_response import EVENTS, SSE

MANY = 100


def after_headers(picker: Target, stream: Stream) -> None:
    picker.begin(stream)


def within_the_body(picker: Target, stream: Stream) -> None:
    picker.begin(stream)
    stream.send_body(picker.chat()[:20], end=False)


def after_the_pick(picker: Target, stream: Stream) -> None:
    picker.picked(stream)


def within_the_answer(picker: Target, stream: Stream) -> None:
    served = picker.picked(stream)[0]
    stream.send_response_headers(SSE, served=served)
    stream.send_response_body(EVENTS[0], end=False)
    with contextlib.suppress(StreamEndedError):  # a picker may leave answers alone
        stream.receive()


STAGES = (after_headers, within_the_body, after_the_pick, within_the_answer)


@should(Source.USERS, "A stream that is cancelled at any point leaves the picker serving.")
@pytest.mark.parametrize("stage", STAGES)
def test_cancelled(picker: Target, stage: Callable[[Target, Stream], None]) -> None:
    with picker.stream() as stream:
        stage(picker, stream)
    picker.assert_serves()


@should(Source.USERS, "A stream that the data plane ends at any point leaves the picker serving.")
@pytest.mark.parametrize("stage", STAGES)
def test_ended(picker: Target, stage: Callable[[Target, Stream], None]) -> None:
    with picker.stream() as stream:
        stage(picker, stream)
        stream.close()
        stream.until_end()
    picker.assert_serves()


@must(
    Source.EXT_PROC,
    "The data plane may keep the bodies of answers: then the picker answers their headers, and ends well.",
)
def test_without_bodies_of_answers(picker: Target) -> None:
    with picker.stream(modes=(FULL_DUPLEX, NONE)) as stream:
        served = picker.picked(stream)[0]
        stream.send_response_headers(served=served)
        stream.close()
        code, messages = stream.until_end()
    assert code.name == "OK", f"the stream ended with {code.name}"
    assert [message.WhichOneof("response") for message in messages] in ([], ["response_headers"])


@should(Source.EXT_PROC, "A data plane that does not send protocol_config, as older ones, is served.")
def test_without_protocol_config(picker: Target) -> None:
    with picker.stream(modes=None) as stream:
        picker.picked(stream)


@should(Source.EXT_PROC, "Messages in observability mode are not answered, and end in an orderly way.")
def test_observability_mode(picker: Target) -> None:
    with picker.stream(observe=True) as stream:
        picker.begin(stream)
        stream.send_body(picker.chat())
        stream.send_response_headers()
        stream.send_response_body(b"{}")
        stream.close()
        code, messages = stream.until_end()
    kinds = [message.WhichOneof("response") for message in messages]
    assert code.name == "OK", f"the stream ended with {code.name}"
    assert not kinds, f"answered: {kinds}"
    picker.assert_serves()
