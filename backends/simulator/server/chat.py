"""Answers of `POST /v1/chat/completions`, complete and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backends.simulator.server.compose import ComposedAnswer
from backends.simulator.server.driver import Emitted, Play
from backends.simulator.server.protocol import ChatBody
from backends.simulator.server.rendering import RenderedReply, event, tool_call_id

_CHUNK = "chat.completion.chunk"


def chat_body(reply: RenderedReply[ChatBody], plays: Sequence[Play]) -> dict[str, Any]:
    """Return a complete chat completion."""
    with_ids = reply.body.return_token_ids
    choices = [
        {
            "index": index,
            "message": _message(answer),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_string,
            "token_ids": answer.ids if with_ids else None,
        }
        for index, answer in enumerate(reply.answers)
    ]
    prompt_ids = reply.answers[0].prompt_ids if with_ids else None
    return {
        **reply.fields("chat.completion"),
        "choices": choices,
        **reply.end_of(plays),
        "prompt_token_ids": prompt_ids,
    }


def _message(answer: ComposedAnswer) -> dict[str, Any]:
    if answer.tool is None:
        return {"role": "assistant", "content": answer.text}
    function = {"name": answer.tool.name, "arguments": answer.arguments}
    call = {"id": tool_call_id(), "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class ChatStream:
    """A chat completion as server-sent events: a chunk with the role, one for each step, and one with the usage."""

    def __init__(self, reply: RenderedReply[ChatBody]) -> None:
        self._reply = reply
        self._begun = False
        self._named: set[int] = set()  # choices whose tool has been named

    def step(self, emitted: Emitted) -> bytes:
        """Return the chunk of a step."""
        chunks = b"" if self._begun else self._roles()
        self._begun = True
        delta = self._delta(emitted)
        return chunks + (self._chunk(emitted, delta) if delta or emitted.is_last else b"")

    def end(self, plays: Sequence[Play]) -> bytes:
        """Return the usage, if requested, and the end of the stream."""
        return self._reply.end_of_stream(_CHUNK, plays)

    def _roles(self) -> bytes:
        chunks = b""
        for index, answer in enumerate(self._reply.answers):
            chunk = self._reply.fields(_CHUNK)
            chunk["choices"] = [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
            chunk["prompt_token_ids"] = answer.prompt_ids if self._reply.body.return_token_ids else None
            chunks += event(chunk)
        return chunks

    def _delta(self, emitted: Emitted) -> dict[str, Any]:
        """Return what a step adds: text, or the name of a tool once it is written and pieces of its arguments."""
        play, tool = emitted.play, emitted.play.answer.tool
        if tool is None:
            return {"content": emitted.text}
        call: dict[str, Any] = {"index": 0, "function": {"arguments": emitted.text}}
        if play.index not in self._named and play.answer.lengths[emitted.end - 1] >= tool.start:
            self._named.add(play.index)
            call |= {"id": tool_call_id(), "type": "function"}
            call["function"]["name"] = tool.name
        return {"tool_calls": [call]} if emitted.text or "id" in call else {}

    def _chunk(self, emitted: Emitted, delta: dict[str, Any]) -> bytes:
        play, reply = emitted.play, self._reply
        choice: dict[str, Any] = {"index": play.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if emitted.is_last:
            choice["finish_reason"] = play.answer.finish_reason
            choice["stop_reason"] = play.answer.stop_string
        choice["token_ids"] = play.answer.ids[emitted.start : emitted.end] if reply.body.return_token_ids else None
        chunk = reply.fields(_CHUNK)
        chunk["choices"] = [choice]
        if emitted.is_last and not reply.body.wants_usage:
            chunk["system_fingerprint"] = reply.fingerprint
        return event(chunk)
