"""Decides whether an answer that ended without an error is usable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from gateway.dialects.transcript import dicts, documents_of
from policies.features.request import Endpoint, RequestFeatures
from policies.features.shape import JSON

_TAIL_CHARS: Final = 512
_MOST_PERIOD: Final = 64
_ENDED: Final = frozenset({"stop", "tool_calls", "function_call", "completed"})
"""Finish reasons of complete answers; one cut at a limit may stop anywhere."""
_PLAIN: Final = frozenset(
    {
        *("model", "messages", "prompt", "input", "instructions", "system", "previous_response_id"),
        *("stream", "stream_options", "user", "metadata", "store", "seed", "priority", "service_tier"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "temperature", "top_p", "n"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("response_format", "text", "structured_outputs", "guided_json"),
        *("tools", "functions", "tool_choice", "function_call", "parallel_tool_calls"),
        *("logprobs", "top_logprobs", "prompt_logprobs"),
        *("thinking", "reasoning", "reasoning_effort", "chat_template_kwargs"),
        *("cache_salt", "prompt_cache_key", "safety_identifier", "request_id", "return_token_ids"),
    }
)
"""Request fields that do not keep an engine from a complete answer; penalties are judged by value."""
_HOTTEST: Final = 1.0
"""Temperature above which a model may produce anything."""


def is_engines_own(request: RequestFeatures, body: Mapping[str, Any]) -> bool:
    """Return whether an unusable answer to a request would be the engine's fault.

    The client's parameters may cut an answer (`stop`), bend it (`bad_words`) or add to it (`echo`): a request with any
    field not known to be harmless is no evidence. Empty fields count as absent.

    Examples
    --------
    >>> request = RequestFeatures("llama", Endpoint.CHAT)
    >>> is_engines_own(request, {"prompt": "a", "stop": None}), is_engines_own(request, {"prompt": "a", "stop": "}"})
    (True, False)
    """
    if request.restricted or request.n > 1 or request.temperature > _HOTTEST:
        return False
    outputs = body.get("structured_outputs")
    return all(name in _PLAIN or not value for name, value in body.items()) and (
        not isinstance(outputs, dict) or not outputs.get("whitespace_pattern")
    )


def problem_of(endpoint: Endpoint, shape: Sequence[str], answer: bytes, *, stream: bool) -> str:
    """Return what is wrong with an answer; empty if it is usable, or that is unknown.

    In an answer that declares itself complete, requested JSON and tool arguments must parse; an answer cut at its limit
    must not end in endless repetition.

    Examples
    --------
    >>> cut = b'{"choices": [{"message": {"content": "{\\\\"a\\\\": "}, "finish_reason": "stop"}]}'
    >>> problem_of(Endpoint.CHAT, ("json_object",), cut, stream=False)
    'not JSON'
    """
    for choice in _choices(endpoint, answer, stream=stream):
        if choice.reason == "length" and _repeats(choice.text):
            return "endless repetition"
        if choice.reason not in _ENDED or choice.is_cut:
            continue
        if any(not _is_json(arguments) for arguments in choice.arguments.values()):
            return "arguments that are not JSON"
        wants_text = not choice.arguments and any(each in JSON for each in shape)
        if wants_text and choice.text and not _is_json(choice.text):
            return "not JSON"
    return ""


class _Choice:
    """The content of one choice of an answer."""

    def __init__(self) -> None:
        self.text, self.reason, self.is_cut = "", "", False
        self.arguments: dict[int, str] = {}  # of its tool calls, by index

    def add(self, message: dict[str, Any]) -> None:
        """Add a message, or a part of one."""
        self.text += _text(message.get("content"))
        for position, call in enumerate(dicts(message.get("tool_calls"))):
            index = call.get("index", position)
            if isinstance(function := call.get("function"), dict) and isinstance(index, int):
                self.arguments[index] = self.arguments.get(index, "") + _text(function.get("arguments"))


def _choices(endpoint: Endpoint, answer: bytes, *, stream: bool) -> list[_Choice]:
    found: dict[int, _Choice] = {}
    for document in documents_of(answer, stream=stream):
        if endpoint is Endpoint.RESPONSES:
            _add_response(found.setdefault(0, _Choice()), document)
        for choice in dicts(document.get("choices")):
            index = choice.get("index", 0)
            one = found.setdefault(index if isinstance(index, int) else 0, _Choice())
            one.text += _text(choice.get("text"))
            one.reason = _text(choice.get("finish_reason")) or one.reason
            # Cut at a stop word or token of the client.
            one.is_cut |= choice.get("stop_reason") is not None
            if isinstance(message := choice.get("delta") or choice.get("message"), dict):
                one.add(message)
    return list(found.values())


def _add_response(choice: _Choice, document: dict[str, Any]) -> None:
    """Read a response of the responses API, which the last event of a stream contains too."""
    response = document.get("response", document)
    if not isinstance(response, dict) or response.get("status") != "completed":
        return
    choice.reason = "completed"
    for index, item in enumerate(dicts(response.get("output"))):
        if item.get("type") == "function_call":
            choice.arguments[index] = _text(item.get("arguments"))
        choice.text += "".join(_text(part.get("text")) for part in dicts(item.get("content")))


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text or "{}")  # a call without arguments has none
    except orjson.JSONDecodeError:
        return False
    return True


def _repeats(text: str) -> bool:
    """Return whether the end of a text repeats something short over and over."""
    tail = text[-_TAIL_CHARS:]
    return len(tail) == _TAIL_CHARS and any(tail[period:] == tail[:-period] for period in range(1, _MOST_PERIOD + 1))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
