"""`POST /v1/responses`: chat completions in the format of the Responses API.

Nothing is stored, as in a vLLM without `VLLM_ENABLE_RESPONSES_API_STORE=1`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from uuid import uuid4

from backends.simulator.server.chat import ChatChoices
from backends.simulator.server.composing import Served, compose_chat
from backends.simulator.server.http import Exchange
from backends.simulator.server.playback import Play, Usage
from backends.simulator.server.protocol import Body, ChatBody, RequestError, validate
from backends.simulator.server.rendering import Head, event


class ResponsesRequest(Body):
    """The body of a request."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool | None = True
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    background: bool | None = False
    request_id: str | None = None


class ResponsesBody(ChatBody):
    """A chat completion, and the original request, parts of which the response repeats."""

    asked: ResponsesRequest


def read_responses(value: Any) -> ResponsesBody:
    """Convert a responses request to a chat completion."""
    asked = validate(ResponsesRequest, value)
    functions = [
        {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}
        for tool in asked.tools or ()
        if tool.get("type") == "function"
    ]
    choice: Any = asked.tool_choice if functions else None
    if isinstance(choice, Mapping):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    same = asked.model_dump(
        include={"model", "temperature", "top_p", "top_k", "min_p", "logit_bias", "seed", "stop", "stream"}
    )
    return ResponsesBody(
        **same,
        asked=asked,
        messages=_messages(asked),
        max_tokens=asked.max_output_tokens,
        ignore_eos=asked.ignore_eos,
        request_id=asked.request_id,
        tools=functions or None,
        tool_choice=choice,
        response_format=_response_format(asked.text),
    )


def compose_responses(served: Served, body: ResponsesBody) -> ChatChoices:
    """Compose a response."""
    asked = body.asked
    if asked.background:
        raise RequestError(
            "This vLLM engine does not support `store=True` and therefore does not support the background mode. To "
            "enable these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching "
            "the vLLM server.",
            "background",
            kind="invalid_request_error",
        )
    if asked.previous_response_id is not None:
        raise not_stored(asked.previous_response_id)
    return compose_chat(served, body)


def not_stored(response_id: str) -> RequestError:
    """Return the error for a response that is not stored."""
    message = f"Response with id '{response_id}' not found."
    return RequestError(message, "response_id", kind="invalid_request_error", code=404)


def _messages(asked: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    for item in asked.input:
        if item.get("type") == "function_call_output":
            messages.append({"role": "tool", "content": str(item.get("output", ""))})
        elif item.get("type") == "function_call":
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            messages.append({"role": "assistant", "content": None, "tool_calls": [{"function": call}]})
        elif "content" in item:
            messages.append({"role": item.get("role", "user"), "content": item["content"]})
    return messages


def _response_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    form = (text or {}).get("format") or {}
    if form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": form.get("name"), "schema": form.get("schema") or {}}}
    return {"type": "json_object"} if form.get("type") == "json_object" else None


def responses_body(head: Head, choices: ChatChoices, plays: Sequence[Play]) -> dict[str, Any]:
    """Return a complete response."""
    return _response(head, choices, _item(choices, _Ids(), "completed"), plays)


class _Ids:
    """Ids of the items of one response."""

    def __init__(self) -> None:
        mark = uuid4().hex[:16]
        self.message, self.call, self.function = f"msg_{mark}", f"call_{mark}", f"fc_{mark}"


def _item(choices: ChatChoices, ids: _Ids, status: str) -> dict[str, Any]:
    """Return the output item: a message or a tool call, empty while in progress."""
    answer, tool = choices.answers[0], choices.tools[0]
    done = status != "in_progress"
    if tool is not None:
        arguments = answer.text[tool.start : tool.end] if done else ""
        fields = {"call_id": ids.call, "name": tool.name, "type": "function_call", "id": ids.function}
        return {"arguments": arguments, **fields, "status": status}
    content = [_part(answer.text)] if done else []
    return {"id": ids.message, "content": content, "role": "assistant", "status": status, "type": "message"}


def _part(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": []}


def _response(head: Head, choices: ChatChoices, item: dict[str, Any] | None, plays: Sequence[Play]) -> dict[str, Any]:
    """Return the response object; without an item it is in progress."""
    body = choices.body
    assert isinstance(body, ResponsesBody)
    asked = body.asked
    cut = item is not None and choices.answers[0].finish_reason == "length"
    return {
        "id": head.id,
        "created_at": head.created,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": asked.instructions,
        "metadata": asked.metadata,
        "model": head.model,
        "object": "response",
        "output": [] if item is None else [item],
        "parallel_tool_calls": asked.parallel_tool_calls,
        "temperature": body.temperature,
        "tool_choice": asked.tool_choice,
        "tools": asked.tools or [],
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "background": False,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "previous_response_id": None,
        "prompt": None,
        "reasoning": None,
        "service_tier": "auto",
        "status": "in_progress" if item is None else "incomplete" if cut else "completed",
        "text": asked.text,
        "top_logprobs": 0,
        "truncation": "disabled",
        "usage": None if item is None else _usage(plays),
        "user": None,
        "system_fingerprint": head.fingerprint,
    }


def _usage(plays: Sequence[Play]) -> dict[str, Any]:
    usage = Usage.of(plays, include_created=False)
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }


class ResponsesStream:
    """A response as server-sent events of the API."""

    def __init__(self, exchange: Exchange, head: Head, choices: ChatChoices) -> None:
        self._exchange = exchange
        self._head = head
        self._choices = choices
        self._ids = _Ids()
        self._sequence = 0
        self._begun = False

    def on_tokens(self, play: Play, start: int, end: int) -> None:
        """Send the delta of a step."""
        events = b"" if self._begun else self._opening()
        self._begun = True
        shown, tool = play.answer.lengths, self._choices.tools[0]
        since, until = (shown[start - 1] if start else 0), shown[end - 1]
        if tool is not None:
            piece = play.answer.text[max(since, tool.start) : min(until, tool.end)]
            arguments = {**self._function_ids(), "delta": piece}
            events += self._event("response.function_call_arguments.delta", arguments) if piece else b""
        elif until > since:
            delta = {**self._content_ids(), "delta": play.answer.text[since:until], "logprobs": []}
            events += self._event("response.output_text.delta", delta)
        if events:
            self._exchange.write(events)

    def done(self, plays: Sequence[Play]) -> None:
        """Close the open items and end the stream."""
        answer, tool = self._choices.answers[0], self._choices.tools[0]
        item = _item(self._choices, self._ids, "completed")
        if tool is not None:
            fields = {**self._function_ids(), "name": tool.name, "arguments": item["arguments"]}
            events = self._event("response.function_call_arguments.done", fields)
        else:
            ids = self._content_ids()
            events = self._event("response.output_text.done", {**ids, "text": answer.text, "logprobs": []})
            events += self._event("response.content_part.done", {**ids, "part": _part(answer.text)})
        events += self._event("response.output_item.done", {"output_index": 0, "item": item})
        response = _response(self._head, self._choices, item, plays)
        events += self._event("response.completed", {"response": response})  # also if its status is incomplete
        self._exchange.end(events)

    def _opening(self) -> bytes:
        response = _response(self._head, self._choices, None, ())
        events = self._event("response.created", {"response": response})
        events += self._event("response.in_progress", {"response": response})
        item = _item(self._choices, self._ids, "in_progress")
        events += self._event("response.output_item.added", {"output_index": 0, "item": item})
        if self._choices.tools[0] is None:
            events += self._event("response.content_part.added", {**self._content_ids(), "part": _part("")})
        return events

    def _function_ids(self) -> dict[str, Any]:
        return {"item_id": self._ids.function, "output_index": 0}

    def _content_ids(self) -> dict[str, Any]:
        return {"item_id": self._ids.message, "output_index": 0, "content_index": 0}

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        self._sequence += 1
        return event({"type": name, "sequence_number": self._sequence - 1, **fields}, name)
