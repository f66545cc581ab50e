"""Answers of `POST /v1/chat/completions`, complete and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson

from backends.simulator.server.answer import Answer
from backends.simulator.server.http import Exchange
from backends.simulator.server.playback import Play, Usage, request_metrics
from backends.simulator.server.protocol import ChatBody
from backends.simulator.server.rendering import DONE, Head, chat_logprobs, event
from backends.simulator.text.model import TargetModel
from backends.simulator.text.structured import ToolCall

_PLAIN_REST = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'


@dataclass(frozen=True, slots=True)
class ChatChoices:
    """The answers to a chat request."""

    body: ChatBody
    answers: Sequence[Answer]
    tools: Sequence[ToolCall | None]  # for each choice, its tool call or None
    model: TargetModel

    def finish_reason(self, index: int) -> str:
        """Return the finish reason of a choice; a call of a tool named by the client counts as a plain stop."""
        reason = self.answers[index].finish_reason
        named = isinstance(self.body.tool_choice, dict)
        return "tool_calls" if reason == "stop" and self.tools[index] is not None and not named else reason

    def logprobs(self, index: int, start: int, end: int) -> dict[str, Any] | None:
        """Return the log probabilities of a choice's tokens, if requested."""
        if not self.body.logprobs:
            return None
        return chat_logprobs(self.model, self.answers[index], start, end, self.body.top_logprobs or 0)


def tool_call_id() -> str:
    """Return a new tool call id in vLLM's form."""
    return f"chatcmpl-tool-{uuid4().hex[:16]}"


def chat_body(head: Head, choices: ChatChoices, plays: Sequence[Play]) -> dict[str, Any]:
    """Return a complete chat completion."""
    body = choices.body
    usage = Usage.of(plays, include_created=True)
    prompt_ids = choices.answers[0].prompt_ids
    return {
        **head.fields("chat.completion"),
        "choices": [
            {
                "index": index,
                "message": _message(answer, choices.tools[index], choices.finish_reason(index)),
                "logprobs": choices.logprobs(index, 0, len(answer.ids)),
                "finish_reason": choices.finish_reason(index),
                "stop_reason": answer.stop_reason,
                "token_ids": answer.ids if body.return_token_ids else None,
                "routed_experts": None,
            }
            for index, answer in enumerate(choices.answers)
        ],
        "service_tier": None,
        "system_fingerprint": head.fingerprint,
        "usage": usage.body(),
        "prompt_logprobs": None,
        "prompt_token_ids": prompt_ids if body.return_token_ids else None,
        "prompt_text": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": request_metrics(plays, head.num_speculative_tokens),
    }


def _message(answer: Answer, tool: ToolCall | None, finish_reason: str) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    if tool is not None and finish_reason != "length":
        arguments = answer.text[tool.start : tool.end]
        call = {"id": tool_call_id(), "type": "function", "function": {"name": tool.name, "arguments": arguments}}
        message["content"] = None
        message["tool_calls"] = [call]
    message["reasoning"] = None
    return message


class ChatStream:
    """A chat completion as server-sent events: a chunk with the role, one for each step, and one with the usage."""

    def __init__(self, exchange: Exchange, head: Head, choices: ChatChoices) -> None:
        self._exchange = exchange
        self._head = head
        self._choices = choices
        options = choices.body.stream_options
        self._usage = bool(options and options.include_usage)
        self._continuous = bool(self._usage and options and options.continuous_usage_stats)
        self._token_ids = bool(choices.body.return_token_ids)
        self._plain = not (self._continuous or self._token_ids or choices.body.logprobs)
        fields = orjson.dumps(head.fields("chat.completion.chunk"))[:-1]
        self._prefixes = [
            b'data: %b,"choices":[{"index":%d,"delta":{"content":' % (fields, index)
            for index in range(len(choices.answers))
        ]
        self._begun = False
        self._named = [False] * len(choices.answers)

    def on_tokens(self, play: Play, start: int, end: int) -> None:
        """Send the chunk of a step."""
        chunks = b"" if self._begun else self._roles()
        self._begun = True
        tool = self._choices.tools[play.index]
        if tool is None:
            chunks += self._text_chunk(play, start, end)
        else:
            deltas = self._tool_deltas(play, tool, start, end)
            for delta in deltas:
                chunks += self._chunk(play, delta, start, end, last=play.finished and delta is deltas[-1])
        if chunks:
            self._exchange.write(chunks)

    def done(self, plays: Sequence[Play]) -> None:
        """Send the usage, if requested, and end the stream."""
        last = b""
        if self._usage:
            chunk = self._head.fields("chat.completion.chunk")
            chunk["choices"] = []
            chunk["usage"] = Usage.of(plays, include_created=True).chunk()
            chunk["system_fingerprint"] = self._head.fingerprint
            metrics = request_metrics(plays, self._head.num_speculative_tokens)
            if metrics is not None:
                chunk["metrics"] = {name: value for name, value in metrics.items() if value is not None}
            last = event(chunk)
        self._exchange.end(last + DONE)

    def _roles(self) -> bytes:
        chunks = b""
        for index, answer in enumerate(self._choices.answers):
            chunk = self._head.fields("chat.completion.chunk")
            delta = {"role": "assistant", "content": ""}
            chunk["choices"] = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
            if self._continuous:
                chunk["usage"] = _running_usage(len(answer.prompt_ids), 0)
            chunk["prompt_token_ids"] = answer.prompt_ids if self._token_ids else None
            chunk["prompt_text"] = None
            chunks += event(chunk)
        return chunks

    def _text_chunk(self, play: Play, start: int, end: int) -> bytes:
        answer = play.answer
        shown = answer.lengths
        text = answer.text[shown[start - 1] if start else 0 : shown[end - 1]]
        if self._plain and not play.finished:
            return self._prefixes[play.index] + orjson.dumps(text) + _PLAIN_REST
        return self._chunk(play, {"content": text}, start, end, last=play.finished)

    def _tool_deltas(self, play: Play, tool: ToolCall, start: int, end: int) -> list[dict[str, Any]]:
        """Return the deltas of a tool call in a step: its name once it is written, then pieces of its arguments."""
        shown = play.answer.lengths
        since, until = (shown[start - 1] if start else 0), shown[end - 1]
        deltas: list[dict[str, Any]] = []
        if not self._named[play.index] and until >= tool.start:
            self._named[play.index] = True
            function = {"name": tool.name, "arguments": ""}
            deltas.append(
                {"tool_calls": [{"id": tool_call_id(), "type": "function", "index": 0, "function": function}]}
            )
        arguments = play.answer.text[max(since, tool.start) : min(until, tool.end)]
        if arguments:
            deltas.append({"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]})
        if play.finished and not deltas:
            deltas.append({})
        return deltas

    def _chunk(self, play: Play, delta: dict[str, Any], start: int, end: int, *, last: bool) -> bytes:
        choices, answer = self._choices, play.answer
        choice: dict[str, Any] = {
            "index": play.index,
            "delta": delta,
            "logprobs": choices.logprobs(play.index, start, end),
            "finish_reason": None,
        }
        if last:
            choice["finish_reason"] = choices.finish_reason(play.index)
            choice["stop_reason"] = answer.stop_reason
        choice["token_ids"] = answer.ids[start:end] if self._token_ids else None
        chunk = self._head.fields("chat.completion.chunk")
        chunk["choices"] = [choice]
        if self._continuous:
            chunk["usage"] = _running_usage(len(answer.prompt_ids), end)
        if last and not self._usage:
            chunk["system_fingerprint"] = self._head.fingerprint
        return event(chunk)


def _running_usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "completion_tokens_details": None,
    }
