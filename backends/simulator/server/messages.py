"""`POST /v1/messages` and its token count: chat completions in the format of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from backends.simulator.server.chat import ChatChoices, tool_call_id
from backends.simulator.server.http import Exchange
from backends.simulator.server.playback import Play, Usage
from backends.simulator.server.protocol import Body, ChatBody, RequestError, validate
from backends.simulator.server.rendering import Head, event


class CountRequest(Body):
    """The body of a request to count tokens."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """The body of a request for a message."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    output_config: dict[str, Any] | None = None


def read_messages(value: Any) -> ChatBody:
    """Convert a messages request to a chat completion."""
    asked = validate(MessagesRequest, value)
    choice = asked.tool_choice or {}
    named = {"type": "function", "function": {"name": choice.get("name")}}
    choices = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    return ChatBody(
        **asked.model_dump(include={"model", "max_tokens", "temperature", "top_p", "top_k", "stream"}),
        messages=conversation(asked),
        tools=functions(asked),
        tool_choice=choices.get(str(choice.get("type"))) if asked.tools else None,
        stop=asked.stop_sequences,
        response_format=_response_format(asked.output_config),
    )


def conversation(asked: CountRequest) -> list[dict[str, Any]]:
    """Return the messages of a request in the format of the chat API."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": asked.system}] if asked.system else []
    for message in asked.messages:
        role, content = message.get("role", "user"), message.get("content")
        if not isinstance(content, list):
            messages.append({"role": role, "content": content})
            continue
        for block in content:
            if block.get("type") == "tool_result":
                messages.append({"role": "tool", "content": block.get("content")})
            elif block.get("type") == "tool_use":
                call = {"name": block.get("name"), "arguments": orjson.dumps(block.get("input")).decode()}
                messages.append({"role": role, "content": None, "tool_calls": [{"function": call}]})
        texts = [block for block in content if block.get("type") == "text"]
        if texts:
            messages.append({"role": role, "content": texts})
    return messages


def functions(asked: CountRequest) -> list[dict[str, Any]] | None:
    """Return the tools of a request in the format of the chat API."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": tool.get("input_schema"),
            },
        }
        for tool in asked.tools or ()
    ] or None


def _response_format(output_config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    form = (output_config or {}).get("format") or {}
    if form.get("type") != "json_schema":
        return None
    return {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": form.get("schema") or {}}}


def messages_error(error: RequestError) -> dict[str, Any]:
    """Return an error in the API's format; validation errors have OpenAI's format, as in vLLM."""
    return error.body() if error.kind == "Bad Request" else error.messages_body()


def _stop_fields(choices: ChatChoices) -> dict[str, Any]:
    """Return the stop reason of the message and its stop sequence."""
    answer = choices.answers[0]
    if isinstance(answer.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
    if answer.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "end_turn" if choices.tools[0] is None else "tool_use", "stop_sequence": None}


def messages_body(head: Head, choices: ChatChoices, plays: Sequence[Play]) -> dict[str, Any]:
    """Return a complete message."""
    answer, tool, usage = choices.answers[0], choices.tools[0], Usage.of(plays, include_created=False)
    content: dict[str, Any] = {"type": "text", "text": answer.text}
    if tool is not None and answer.finish_reason != "length":
        arguments = orjson.loads(answer.text[tool.start : tool.end])
        content = {"type": "tool_use", "id": tool_call_id(), "name": tool.name, "input": arguments}
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "content": [content],
        "model": head.model,
        **_stop_fields(choices),
        "usage": {"input_tokens": usage.prompt, "output_tokens": usage.completion},
    }


class MessagesStream:
    """A message as server-sent events of the API."""

    def __init__(self, exchange: Exchange, head: Head, choices: ChatChoices) -> None:
        self._exchange = exchange
        self._head = head
        self._choices = choices
        self._begun = False

    def on_tokens(self, play: Play, start: int, end: int) -> None:
        """Send the delta of a step."""
        events = b"" if self._begun else self._opening()
        self._begun = True
        shown, tool = play.answer.lengths, self._choices.tools[0]
        since, until = (shown[start - 1] if start else 0), shown[end - 1]
        if tool is not None:
            since, until = max(since, tool.start), min(until, tool.end)
        if until > since:
            piece = play.answer.text[since:until]
            delta = {"type": "text_delta", "text": piece}
            if tool is not None:
                delta = {"type": "input_json_delta", "partial_json": piece}
            events += _event("content_block_delta", {"index": 0, "delta": delta})
        if events:
            self._exchange.write(events)

    def done(self, plays: Sequence[Play]) -> None:
        """Close the block and end the stream."""
        usage = Usage.of(plays, include_created=False)
        events = _event("content_block_stop", {"index": 0})
        tokens = {"input_tokens": usage.prompt, "output_tokens": usage.completion}
        events += _event("message_delta", {"delta": _stop_fields(self._choices), "usage": tokens})
        self._exchange.end(events + _event("message_stop", {}))

    def _opening(self) -> bytes:
        message: dict[str, Any] = {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._head.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(self._choices.answers[0].prompt_ids), "output_tokens": 0},
        }
        block: dict[str, Any] = {"type": "text", "text": ""}
        tool = self._choices.tools[0]
        if tool is not None:
            block = {"type": "tool_use", "id": tool_call_id(), "name": tool.name, "input": {}}
        opening = _event("message_start", {"message": message})
        return opening + _event("content_block_start", {"index": 0, "content_block": block})


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return event({"type": name, **fields}, name)
