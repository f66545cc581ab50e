"""The shape of a request: its features on which engines have been seen to break."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

JSON: Final = frozenset({"json_schema", "json_object"})
"""Shapes whose answer is JSON."""
TOOLS: Final = frozenset({"tools", "forced_tool"})

_TOOL_FORCED: Final = ("required", "function", "any", "tool")
GUIDED: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Fields of structured output in vLLM before 0.12."""
LOGPROBS: Final = ("logprobs", "top_logprobs", "prompt_logprobs")
_KINDS: Final = {"json": "json_schema"} | {
    kind: kind for kind in ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
}
LONG_TOKENS: Final = 8_192
_LONG: Final = ((32_768, "prompt_32k"), (LONG_TOKENS, "prompt_8k"))


def offers_tools(body: dict[str, Any]) -> bool:
    """Return whether a request offers tools that the model may call."""
    return bool(body.get("tools") or body.get("functions")) and _tool_choice(body) != "none"


def forces_tool(body: dict[str, Any]) -> bool:
    """Return whether the model must call a tool, if any are offered."""
    return _tool_choice(body) in _TOOL_FORCED


def structure_of(body: dict[str, Any]) -> str:
    """Return the kind of structured output that a request wants; empty without one.

    Examples
    --------
    >>> structure_of({"response_format": {"type": "json_object"}}), structure_of({"structured_outputs": {"regex": "a"}})
    ('json_object', 'regex')
    """
    if outputs := body.get("structured_outputs"):
        kinds = [_KINDS[key] for key in outputs if key in _KINDS and outputs[key]] if isinstance(outputs, dict) else []
        return kinds[0] if kinds else "other_format"
    # One level down in the responses API, and in Anthropic's messages API.
    outer = [value for key in ("text", "output_config") if isinstance(value := body.get(key), dict)]
    for value in (body.get("response_format"), *[each.get("format") for each in outer]):
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "text":
            return _KINDS.get(kind, "other_format")
    for key in GUIDED:  # an empty choice or schema does not constrain the output
        if body.get(key):
            return _KINDS[key.removeprefix("guided_")]
    return ""


def shape_of(
    body: dict[str, Any], structure: str, *, tools: bool, thinking: bool | None, n: int, images: bool, tokens: int
) -> tuple[str, ...]:
    """Return the shape of a request; most have none."""
    shape = [structure] if structure else []
    if tools:
        shape.append("forced_tool" if forces_tool(body) else "tools")
    if thinking:
        shape.append("thinking")
    if any(body.get(key) for key in LOGPROBS):
        shape.append("logprobs")
    if n > 1:
        shape.append("several")
    if images:
        shape.append("images")
    shape += [name for least, name in _LONG if tokens >= least][:1]
    return tuple(shape)


def wants_json(shape: Sequence[str]) -> bool:
    """Return whether the answer must be JSON, or may contain tool arguments."""
    return any(each in JSON or each in TOOLS for each in shape)


def _tool_choice(body: dict[str, Any]) -> object:
    """Return the kind of a tool choice, which is a string or the `type` of a mapping."""
    choice = body.get("tool_choice")
    return choice.get("type") if isinstance(choice, dict) else choice
