"""JSON made from bytes, so that a fuzzer that changes bytes gets documents of the shapes that are read."""

from __future__ import annotations

import json
from typing import Any

_KEYS = (
    *("model", "messages", "role", "content", "prompt", "input", "instructions", "system", "tools", "tool_choice"),
    *("tool_calls", "function", "arguments", "type", "text", "temperature", "top_p", "n", "max_tokens", "stream"),
    *("max_completion_tokens", "min_p", "logit_bias", "response_format", "format", "previous_response_id", "output"),
    *("guided_json", "choices", "index", "delta", "message", "token_ids", "prompt_token_ids", "usage", "metrics"),
    *("completion_tokens", "prompt_tokens", "speculative_decoding", "num_draft_tokens", "time_to_first_token_ms"),
)
_NUMBERS = (0, 1, -1, 2, 0.5, -0.5, 1e308, float("inf"), float("nan"), 2**31, 2**63, 2**64, -(2**63), 10**40, 1e-320, 7)
_TEXTS = ("", "m", "user", "system", "assistant", "text", "required", "json_schema", "0.5", "\ud800", "\0", "é", "none")
_DEEPEST = 8


def document(data: bytes) -> bytes:
    """Return the JSON that these bytes describe: always valid for Python's reader, not for stricter ones."""
    return json.dumps(_value(iter(data), 0)).encode()


def _value(data: Any, depth: int) -> Any:
    kind = next(data, 0) if depth else 7
    argument = next(data, 0)
    if depth >= _DEEPEST:
        kind %= 5
    match kind % 8:
        case 0:
            return (None, True, False)[argument % 3]
        case 1:
            return _NUMBERS[argument % len(_NUMBERS)]
        case 2:
            return _TEXTS[argument % len(_TEXTS)]
        case 3:
            return bytes([next(data, 32) for _ in range(argument)]).decode("latin-1")
        case 4:
            return [argument % 7] * (argument & 63)
        case 5:
            return [_value(data, depth + 1) for _ in range(argument & 7)]
        case _:
            return {_KEYS[next(data, 0) % len(_KEYS)]: _value(data, depth + 1) for _ in range(argument & 15)}
