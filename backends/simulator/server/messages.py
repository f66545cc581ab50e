"""`POST /v1/messages` and its token count: chat completions in the format of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from backends.drafting.script import BLOCK_TOKENS
from backends.simulator.server.compose import ComposedAnswer
from backends.simulator.server.driver import Emitted, Play
from backends.simulator.server.protocol import Body, ChatBody
from backends.simulator.server.rendering import RenderedReply, event, tool_call_id


class CountBody(Body):
    """The body of a request to count tokens."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages in the format of the chat API."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for message in self.messages:
            role, content = message.get("role", "user"), message.get("content")
            blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
            for block in blocks:
                if block.get("type") == "tool_result":
                    messages.append({"role": "tool", "content": block.get("content")})
                elif block.get("type") == "tool_use":
                    call = {"name": block.get("name"), "arguments": orjson.dumps(block.get("input")).decode()}
                    messages.append({"role": role, "content": None, "tool_calls": [{"function": call}]})
            texts = [block for block in blocks if block.get("type") == "text"]
            if texts:
                messages.append({"role": role, "content": texts})
        return messages

    def functions(self) -> list[dict[str, Any]]:
        """Return the tools in the format of the chat API."""
        keys = {"name": "name", "description": "description", "parameters": "input_schema"}
        return [
            {"type": "function", "function": {key: tool.get(other) for key, other in keys.items()}}
            for tool in self.tools or ()
        ]


class MessagesBody(CountBody):
    """The body of a request for a message."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False


def read_messages(value: Any) -> ChatBody:
    """Convert a messages request to a chat completion."""
    asked = MessagesBody.model_validate(value)
    choice = asked.tool_choice or {}
    named = {"type": "function", "function": {"name": choice.get("name")}}
    choices: dict[str, Any] = {"any": "required", "none": "none", "tool": named}
    tools = asked.functions() or None
    return ChatBody(
        **asked.model_dump(include={"model", "temperature", "top_p", "stream"}),
        max_completion_tokens=asked.max_tokens,
        messages=asked.conversation(),
        tools=tools,
        tool_choice=choices.get(str(choice.get("type")), "auto") if tools else None,
        stop=asked.stop_sequences,
    )


def messages_body(reply: RenderedReply[ChatBody], plays: Sequence[Play]) -> dict[str, Any]:
    """Return a complete message."""
    answer = reply.answers[0]
    content: dict[str, Any] = {"type": "text", "text": answer.text}
    if answer.tool is not None:
        content = _tool_use(answer.tool.name, orjson.loads(answer.arguments))
    return {**_head(reply), "content": [content], **_stop(answer), "usage": _usage(plays[0])}


def _usage(play: Play) -> dict[str, int]:
    """Return the usage in Anthropic's terms, where `input_tokens` are those that the cache neither gave nor keeps."""
    prompt, read = len(play.answer.prompt_ids), play.cached_tokens
    created = max(0, prompt - prompt % BLOCK_TOKENS - read)
    return {
        "input_tokens": prompt - read - created,
        "output_tokens": play.sent,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": read,
    }


def _head(reply: RenderedReply[ChatBody]) -> dict[str, Any]:
    return {"id": reply.id, "type": "message", "role": "assistant", "model": reply.model}


def _tool_use(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": tool_call_id(), "name": name, "input": arguments}


def _stop(answer: ComposedAnswer) -> dict[str, Any]:
    if answer.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
    if answer.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "end_turn" if answer.tool is None else "tool_use", "stop_sequence": None}


class MessagesStream:
    """A message as server-sent events of the API."""

    def __init__(self, reply: RenderedReply[ChatBody]) -> None:
        self._reply = reply
        self._answer = reply.answers[0]
        self._begun = False

    def step(self, emitted: Emitted) -> bytes:
        """Return the delta of a step."""
        events = b"" if self._begun else self._opening()
        self._begun = True
        if not emitted.text:
            return events
        delta = {"type": "text_delta", "text": emitted.text}
        if self._answer.tool is not None:
            delta = {"type": "input_json_delta", "partial_json": emitted.text}
        return events + _event("content_block_delta", {"index": 0, "delta": delta})

    def end(self, plays: Sequence[Play]) -> bytes:
        """Return the end of the block and of the message."""
        events = _event("content_block_stop", {"index": 0})
        events += _event("message_delta", {"delta": _stop(self._answer), "usage": _usage(plays[0])})
        return events + _event("message_stop", {})

    def _opening(self) -> bytes:
        usage = {"input_tokens": len(self._answer.prompt_ids), "output_tokens": 0}
        message = {**_head(self._reply), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        tool = self._answer.tool
        block = {"type": "text", "text": ""} if tool is None else _tool_use(tool.name, {})
        opening = _event("message_start", {"message": message})
        return opening + _event("content_block_start", {"index": 0, "content_block": block})


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return event({"type": name, **fields}, name)
