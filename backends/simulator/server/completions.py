"""Answers of `POST /v1/completions`, complete and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backends.simulator.server.driver import Emitted, Play
from backends.simulator.server.protocol import CompletionBody
from backends.simulator.server.rendering import RenderedReply, event

_KIND = "text_completion"


def completion_body(reply: RenderedReply[CompletionBody], plays: Sequence[Play]) -> dict[str, Any]:
    """Return a complete completion."""
    with_ids = reply.body.return_token_ids
    choices = [
        {
            "index": index,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_string,
            "token_ids": answer.ids if with_ids else None,
            "prompt_token_ids": answer.prompt_ids if with_ids else None,
        }
        for index, answer in enumerate(reply.answers)
    ]
    return {**reply.fields(_KIND), "choices": choices, **reply.end_of(plays)}


class CompletionStream:
    """A completion as server-sent events: a chunk for each step, and one with the usage."""

    def __init__(self, reply: RenderedReply[CompletionBody]) -> None:
        self._reply = reply

    def step(self, emitted: Emitted) -> bytes:
        """Return the chunk of a step."""
        play, answer = emitted.play, emitted.play.answer
        with_ids = self._reply.body.return_token_ids
        chunk = self._reply.fields(_KIND)
        chunk["choices"] = [
            {
                "index": play.index,
                "text": emitted.text,
                "logprobs": None,
                "finish_reason": answer.finish_reason if emitted.is_last else None,
                "stop_reason": answer.stop_string if emitted.is_last else None,
                "prompt_token_ids": answer.prompt_ids if with_ids and emitted.start == 0 else None,
                "token_ids": answer.ids[emitted.start : emitted.end] if with_ids else None,
            }
        ]
        if emitted.is_last and not self._reply.body.wants_usage:
            chunk["system_fingerprint"] = self._reply.fingerprint
        return event(chunk)

    def end(self, plays: Sequence[Play]) -> bytes:
        """Return the usage, if requested, and the end of the stream."""
        return self._reply.end_of_stream(_KIND, plays)
