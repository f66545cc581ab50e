"""`POST /v1/responses`: chat completions in the format of the Responses API.

It stores nothing, like vLLM without `VLLM_ENABLE_RESPONSES_API_STORE=1`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from uuid import uuid4

from backends.simulator.server.driver import Emitted, Play
from backends.simulator.server.protocol import Body, ChatBody, InvalidRequestError, Xargs
from backends.simulator.server.rendering import RenderedReply, event, times, usage


class ResponsesBody(Body):
    """The body of a request."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    previous_response_id: str | None = None
    background: bool | None = False
    vllm_xargs: Xargs | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """Return the input in the format of the chat API."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in [{"content": self.input}] if isinstance(self.input, str) else self.input:
            if item.get("type") == "function_call_output":
                messages.append({"role": "tool", "content": str(item.get("output", ""))})
            elif item.get("type") == "function_call":
                call = {"name": item.get("name"), "arguments": item.get("arguments")}
                messages.append({"role": "assistant", "content": None, "tool_calls": [{"function": call}]})
            elif "content" in item:
                messages.append({"role": item.get("role", "user"), "content": item["content"]})
        return messages


class _Chat(ChatBody):
    """The same as a chat completion."""

    @property
    def asked_tokens(self) -> tuple[int | None, str]:
        """The most tokens that it asks for, and the name of the field that says so."""
        return self.max_tokens, "max_output_tokens"


def read_responses(value: Any) -> ChatBody:
    """Convert a responses request to a chat completion."""
    asked = ResponsesBody.model_validate(value)
    if asked.previous_response_id is not None:
        message = f"Response with id '{asked.previous_response_id}' not found."
        raise InvalidRequestError(message, "response_id", kind="invalid_request_error", code=404)
    if asked.background:  # as vLLM without VLLM_ENABLE_RESPONSES_API_STORE
        message = "This vLLM engine does not support `store=True` and therefore does not support the background mode."
        raise InvalidRequestError(message, "background", kind="invalid_request_error")
    functions = [
        {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}
        for tool in asked.tools or ()
        if tool.get("type") == "function"
    ]
    choice: Any = asked.tool_choice
    if choice == "required" and not asked.tools:
        raise InvalidRequestError("Tool choice 'required' must be specified with 'tools' parameter.", "tool_choice")
    if isinstance(choice, Mapping):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    form = (asked.text or {}).get("format") or {}
    sampled = {"temperature", "top_p", "min_p", "logit_bias", "seed", "stop", "ignore_eos", "vllm_xargs"}
    return _Chat(
        **asked.model_dump(include={"model", "stream", *sampled}),
        messages=asked.conversation(),
        max_tokens=asked.max_output_tokens,
        tools=functions or None,
        tool_choice=choice if functions else None,
        response_format={"type": form.get("type"), "json_schema": {"schema": form.get("schema") or {}}},
    )


class _Writer:
    """The parts of one response."""

    def __init__(self, reply: RenderedReply[ChatBody]) -> None:
        self._reply = reply
        self._id = uuid4().hex[:16]

    def response(self, plays: Sequence[Play] | None) -> dict[str, Any]:
        """Return the response object, in progress without `plays`."""
        reply, status = self._reply, "in_progress"
        if plays is not None:
            status = "incomplete" if reply.answers[0].finish_reason == "length" else "completed"
        return {
            "id": reply.id,
            "object": "response",
            "created_at": reply.created,
            "model": reply.model,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [] if plays is None else [self.item("completed")],
            "usage": None if plays is None else _usage(plays),
            "metrics": None if plays is None else times(plays[0]) | {"speculative_decoding": None},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "system_fingerprint": reply.fingerprint,
        }

    def item(self, status: str) -> dict[str, Any]:
        """Return the output item: a message or a tool call, empty while in progress."""
        answer, is_done = self._reply.answers[0], status == "completed"
        fields = {**self.ids(), "status": status}
        fields["id"] = fields.pop("item_id")
        if answer.tool is not None:
            arguments = answer.arguments if is_done else ""
            call = {"type": "function_call", "call_id": f"call_{self._id}", "name": answer.tool.name}
            return {**call, **fields, "arguments": arguments}
        content = [self.part(answer.text)] if is_done else []
        return {"type": "message", "role": "assistant", **fields, "content": content}

    def ids(self) -> dict[str, Any]:
        """Return the id of the item."""
        return {"item_id": f"msg_{self._id}" if self._reply.answers[0].tool is None else f"fc_{self._id}"}

    @staticmethod
    def part(text: str) -> dict[str, Any]:
        """Return the content part of a message."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(plays: Sequence[Play]) -> dict[str, Any]:
    tokens = usage(plays)
    return {
        "input_tokens": tokens["prompt_tokens"],
        "input_tokens_details": tokens["prompt_tokens_details"],
        "output_tokens": tokens["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens["total_tokens"],
    }


def responses_body(reply: RenderedReply[ChatBody], plays: Sequence[Play]) -> dict[str, Any]:
    """Return a complete response."""
    return _Writer(reply).response(plays)


class ResponsesStream:
    """A response as server-sent events of the API."""

    def __init__(self, reply: RenderedReply[ChatBody]) -> None:
        self._answer = reply.answers[0]
        self._writer = _Writer(reply)
        self._sequence = 0

    def step(self, emitted: Emitted) -> bytes:
        """Return the delta of a step."""
        events = b"" if self._sequence else self._opening()
        if not emitted.text:
            return events
        if self._answer.tool is not None:
            return events + self._of_item("function_call_arguments.delta", delta=emitted.text)
        return events + self._of_item("output_text.delta", content_index=0, delta=emitted.text, logprobs=[])

    def end(self, plays: Sequence[Play]) -> bytes:
        """Return the end of the open items and of the response."""
        answer, writer = self._answer, self._writer
        if answer.tool is not None:
            arguments = answer.arguments
            events = self._of_item("function_call_arguments.done", name=answer.tool.name, arguments=arguments)
        else:
            events = self._of_item("output_text.done", content_index=0, text=answer.text, logprobs=[])
            events += self._of_item("content_part.done", content_index=0, part=writer.part(answer.text))
        events += self._event("output_item.done", output_index=0, item=writer.item("completed"))
        return events + self._event("completed", response=writer.response(plays))  # also if its status is incomplete

    def _opening(self) -> bytes:
        writer, events = self._writer, b""
        for name in ("created", "in_progress"):
            events += self._event(name, response=writer.response(None))
        events += self._event("output_item.added", output_index=0, item=writer.item("in_progress"))
        if self._answer.tool is None:
            events += self._of_item("content_part.added", content_index=0, part=writer.part(""))
        return events

    def _of_item(self, name: str, /, **fields: Any) -> bytes:
        return self._event(name, **self._writer.ids(), output_index=0, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._sequence += 1
        kind = f"response.{name}"
        return event({"type": kind, "sequence_number": self._sequence - 1, **fields}, kind)
