"""Answers of `POST /v1/chat/completions` and `/v1/completions`, complete and streamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backends.simulator.server.compose import ComposedAnswer
from backends.simulator.server.driver import Emitted, Play
from backends.simulator.server.protocol import ChatBody, CompletionBody
from backends.simulator.server.rendering import B, RenderedReply, event, running_usage, tool_call_id

_CHUNK = "chat.completion.chunk"
_TEXT = "text_completion"


def chat_body(reply: RenderedReply[ChatBody], plays: Sequence[Play]) -> dict[str, Any]:
    """Return a complete chat completion."""
    choices = [
        {"index": index, "message": _message(answer, reply.body.calls), **_end_of(reply, answer)}
        for index, answer in enumerate(reply.answers)
    ]
    prompt_ids = _prompt_ids(reply, reply.answers[0])
    fields = {**reply.fields("chat.completion"), "choices": choices}
    return {**fields, **reply.end_of(plays), "prompt_token_ids": prompt_ids}


def completion_body(reply: RenderedReply[CompletionBody], plays: Sequence[Play]) -> dict[str, Any]:
    """Return a complete completion."""
    choices = [
        {"index": index, "text": answer.text, **_end_of(reply, answer), "prompt_token_ids": _prompt_ids(reply, answer)}
        for index, answer in enumerate(reply.answers)
    ]
    return {**reply.fields(_TEXT), "choices": choices, **reply.end_of(plays)}


def _message(answer: ComposedAnswer, calls: str | Mapping[str, Any]) -> dict[str, Any]:
    if answer.tool is None:
        return {"role": "assistant", "content": answer.text}
    function = {"name": answer.tool.name, "arguments": answer.arguments}
    call = {"id": tool_call_id(), "type": "function", "function": function}
    return {"role": "assistant", "content": None if calls == "auto" else "", "tool_calls": [call]}


def _end_of(reply: RenderedReply[B], answer: ComposedAnswer) -> dict[str, Any]:
    """Return how an answer ended, and its tokens if requested."""
    ids = answer.ids if reply.body.return_token_ids else None
    return {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_string, "token_ids": ids}


def _prompt_ids(reply: RenderedReply[B], answer: ComposedAnswer) -> list[int] | None:
    return answer.prompt_ids if reply.body.return_token_ids else None


def _chunk(reply: RenderedReply[B], kind: str, emitted: Emitted, **fields: Any) -> bytes:
    """Return the chunk of what a step emitted for a choice; the last one includes how it ended."""
    play, answer = emitted.play, emitted.play.answer
    choice = {"index": play.index, "logprobs": None, "finish_reason": None, **fields}
    if emitted.is_last:
        choice |= _end_of(reply, answer)
    choice["token_ids"] = answer.ids[emitted.start : emitted.end] if reply.body.return_token_ids else None
    chunk = reply.fields(kind) | {"choices": [choice]}
    if emitted.is_last and not reply.body.wants_usage:
        chunk["system_fingerprint"] = reply.fingerprint
    if reply.body.wants_running_usage:
        chunk["usage"] = running_usage(len(answer.prompt_ids), emitted.end)
    return event(chunk)


class ChatStream:
    """A chat completion as server-sent events: a chunk with the role, one per step, and one with the usage."""

    def __init__(self, reply: RenderedReply[ChatBody]) -> None:
        self._reply = reply
        self._begun = False
        self._named: set[int] = set()  # choices that have named their tool

    def step(self, emitted: Emitted) -> bytes:
        """Return the chunk of a step."""
        chunks = b"" if self._begun else self._roles()
        self._begun = True
        delta = self._delta(emitted)
        return chunks + (_chunk(self._reply, _CHUNK, emitted, delta=delta) if delta or emitted.is_last else b"")

    def end(self, plays: Sequence[Play]) -> bytes:
        """Return the usage, if requested, and the end of the stream."""
        return self._reply.end_of_stream(_CHUNK, plays)

    def _roles(self) -> bytes:
        chunks = b""
        for index, answer in enumerate(self._reply.answers):
            chunk = self._reply.fields(_CHUNK)
            delta = {"role": "assistant", "content": ""}
            chunk["choices"] = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
            if self._reply.body.wants_running_usage:
                chunk["usage"] = running_usage(len(answer.prompt_ids), 0)
            chunk["prompt_token_ids"] = _prompt_ids(self._reply, answer)
            chunks += event(chunk)
        return chunks

    def _delta(self, emitted: Emitted) -> dict[str, Any]:
        """Return what a step adds: text, or a tool's name once it is complete, and pieces of its arguments."""
        play, tool = emitted.play, emitted.play.answer.tool
        if tool is None:
            return {"content": emitted.text}
        call: dict[str, Any] = {"index": 0, "function": {"arguments": emitted.text}}
        if play.index not in self._named and play.answer.lengths[emitted.end - 1] >= tool.start:
            self._named.add(play.index)
            call |= {"id": tool_call_id(), "type": "function"}
            call["function"]["name"] = tool.name
        return {"tool_calls": [call]} if emitted.text or "id" in call else {}


class CompletionStream:
    """A completion as server-sent events: a chunk per step, and one with the usage."""

    def __init__(self, reply: RenderedReply[CompletionBody]) -> None:
        self._reply = reply

    def step(self, emitted: Emitted) -> bytes:
        """Return the chunk of a step."""
        prompt_ids = _prompt_ids(self._reply, emitted.play.answer) if emitted.start == 0 else None
        fields = {"text": emitted.text, "stop_reason": None, "prompt_token_ids": prompt_ids}
        return _chunk(self._reply, _TEXT, emitted, **fields)

    def end(self, plays: Sequence[Play]) -> bytes:
        """Return the usage, if requested, and the end of the stream."""
        return self._reply.end_of_stream(_TEXT, plays)
