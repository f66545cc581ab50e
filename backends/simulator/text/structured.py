"""Schema-conforming JSON values and tool calls, filled with words and numbers from the prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import orjson

_WORD = re.compile(r"[A-Za-z][A-Za-z'-]{2,}")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_QUOTED = re.compile(r"[\"'“]([^\"'”\n]{1,80})[\"'”]")
_FORMATS = {
    "date": "2024-05-17",
    "date-time": "2024-05-17T09:30:00Z",
    "email": "alex@example.com",
    "uri": "https://example.com/",
    "uuid": "3f2b8c1e-5d64-4a1b-9c0f-7e2a6d8b4f10",
}
_MAX_DEPTH = 24
_PLAIN: dict[str, Any] = {"type": "object", "properties": {"answer": {"type": "string"}, "items": {"type": "array"}}}


class SchemaValues:
    """Generator of values for JSON schemas, with successive words and numbers from a text.

    Examples
    --------
    >>> schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    >>> SchemaValues(schema, 'The weather in "Oslo" for 3 days').value(schema)
    {'city': 'Oslo', 'days': 3}
    """

    def __init__(self, schema: Mapping[str, Any], text: str) -> None:
        self._root = schema
        self._text = text.lower()
        names = [word for word in _WORD.findall(text)[1:] if word[0].isupper()]
        self._strings = cycle(_QUOTED.findall(text) + names + _WORD.findall(text)[-8:] or ["value"])
        self._numbers = cycle([float(number) for number in _NUMBER.findall(text)] or [1.0])

    def value(self, schema: Mapping[str, Any], depth: int = 0) -> Any:
        """Return a value that `schema` allows, provided that it uses only common keywords."""
        if depth > _MAX_DEPTH:
            return None
        if "$ref" in schema:
            return self.value(self._resolve(str(schema["$ref"])), depth + 1)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            named = [each for each in schema["enum"] if isinstance(each, str) and each.lower() in self._text]
            return (named or schema["enum"])[0]
        choices = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
        if choices:
            return self.value(choices[0], depth + 1)
        kind = schema.get("type", "object" if "properties" in schema else "string")
        if kind == "object":
            return {name: self.value(each, depth + 1) for name, each in schema.get("properties", {}).items()}
        if kind == "array":
            count = min(max(2, int(schema.get("minItems", 0))), int(schema.get("maxItems", 8)))
            return [self.value(schema.get("items", {}), depth + 1) for _ in range(count)]
        return self._plain(str(kind), schema)

    def _plain(self, kind: str, schema: Mapping[str, Any]) -> Any:
        if kind in {"integer", "number"}:
            number = self._number(schema)
            return int(number) if kind == "integer" else number
        if kind in {"boolean", "null"}:
            return True if kind == "boolean" else None
        return _FORMATS.get(str(schema.get("format"))) or self._string(schema)

    def _number(self, schema: Mapping[str, Any]) -> float:
        low, high = schema.get("minimum", float("-inf")), schema.get("maximum", float("inf"))
        return float(min(max(next(self._numbers), low), high))

    def _string(self, schema: Mapping[str, Any]) -> str:
        text: str = next(self._strings)
        while len(text) < int(schema.get("minLength", 0)):
            text += " " + next(self._strings)
        return text[: int(schema.get("maxLength", len(text)))]

    def _resolve(self, reference: str) -> Mapping[str, Any]:
        schema: Any = self._root
        for name in reference.removeprefix("#/").split("/"):
            schema = schema[name]
        found: Mapping[str, Any] = schema
        return found


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call within the text of an answer."""

    name: str
    text: str
    start: int  # where its arguments start in `text`
    end: int  # where they end


def json_text(response_format: Mapping[str, Any] | None, prompt: str) -> str | None:
    """Return the text of a structured output; None if none is requested.

    Examples
    --------
    >>> json_text({"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}, "Is it? yes or no")
    '"yes"'
    """
    kind = (response_format or {}).get("type")
    if response_format is None or kind not in {"json_schema", "json_object"}:
        return None
    schema = response_format["json_schema"]["schema"] if kind == "json_schema" else _PLAIN
    return orjson.dumps(SchemaValues(schema, prompt).value(schema)).decode()


def tool_call(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any], prompt: str) -> ToolCall | None:
    """Return the model's tool call; None if it answers in words."""
    functions = [tool["function"] for tool in tools]
    if isinstance(choice, Mapping):
        functions = [function for function in functions if function["name"] == choice["function"]["name"]]
    words = {word.lower() for word in _WORD.findall(prompt)}
    shared = [len(words & _words_of(function)) for function in functions]
    if not functions or (choice == "auto" and not max(shared)):
        return None
    function = functions[shared.index(max(shared))]
    name, schema = str(function["name"]), function.get("parameters") or {"type": "object"}
    arguments = orjson.dumps(SchemaValues(schema, prompt).value(schema)).decode()
    before = f'<tool_call>\n{{"name": "{name}", "arguments": '
    return ToolCall(name, f"{before}{arguments}}}\n</tool_call>", len(before), len(before) + len(arguments))


def _words_of(function: Mapping[str, Any]) -> set[str]:
    description = f"{function.get('name', '')} {function.get('description', '')}".replace("_", " ")
    return {word.lower() for word in _WORD.findall(description) if len(word) > 3}
