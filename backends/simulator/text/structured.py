"""JSON values that conform to a schema, and tool calls, filled with words and numbers from the prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

_WORD = re.compile(r"[A-Za-z][A-Za-z'-]{2,}")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_QUOTED = re.compile(r"[\"'“]([^\"'”\n]{1,80})[\"'”]")
_FORMATS = {
    "date": "2024-05-17",
    "date-time": "2024-05-17T09:30:00Z",
    "time": "09:30:00Z",
    "email": "alex@example.com",
    "uri": "https://example.com/",
    "uuid": "3f2b8c1e-5d64-4a1b-9c0f-7e2a6d8b4f10",
    "ipv4": "192.0.2.1",
}
_MAX_DEPTH = 6
_PLAIN: dict[str, Any] = {"type": "object", "properties": {"answer": {"type": "string"}, "items": {"type": "array"}}}


class SchemaValues:
    """Generator of values for JSON schemas, with words and numbers taken from a text.

    Examples
    --------
    >>> schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    >>> SchemaValues(schema, 'The weather in "Oslo" for 3 days', Random(0)).value(schema)
    {'city': 'Oslo', 'days': 3}
    """

    def __init__(self, schema: Mapping[str, Any], text: str, random: Random) -> None:
        self._root = schema
        self._text = text  # source of the values, which are taken in turn
        self._random = random
        first = _WORD.search(text)
        names = [word for word in _WORD.findall(text) if word[0].isupper() and (not first or word != first[0])]
        self._strings = _QUOTED.findall(text) + names + _WORD.findall(text)[-8:] or ["value"]
        self._numbers = [float(number) for number in _NUMBER.findall(text)]
        self._taken = 0

    def value(self, schema: Any, depth: int = 0) -> Any:
        """Return a value that `schema` allows; supports the common keywords."""
        if not isinstance(schema, Mapping):
            return self._string({})
        if "$ref" in schema:
            return self.value(self._resolve(str(schema["$ref"])), depth + 1) if depth < 4 * _MAX_DEPTH else None
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return self._one_of(schema["enum"])
        for keyword in ("anyOf", "oneOf"):
            if schema.get(keyword):
                return self.value(self._simplest(schema[keyword], depth), depth + 1)
        if schema.get("allOf"):
            merged: dict[str, Any] = {}
            for part in schema["allOf"]:
                part = self._resolve(str(part["$ref"])) if "$ref" in part else part  # noqa: PLW2901
                merged = {
                    **merged,
                    **part,
                    "properties": {**merged.get("properties", {}), **part.get("properties", {})},
                }
            return self.value(merged, depth + 1)
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = next((each for each in kind if each != "null"), "null")
        if kind is None:
            kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
        return self._of_type(str(kind), schema, depth)

    def _of_type(self, kind: str, schema: Mapping[str, Any], depth: int) -> Any:
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind in ("integer", "number"):
            return self._number(schema, whole=kind == "integer")
        if kind == "boolean":
            return self._random.random() < 0.7
        return None if kind == "null" else self._string(schema)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = set(schema.get("required", ()))
        return {
            name: self.value(each, depth + 1)
            for name, each in schema.get("properties", {}).items()
            if name in required or depth < _MAX_DEPTH
        }

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        least, most = int(schema.get("minItems", 0)), int(schema.get("maxItems", 8))
        count = least if depth >= _MAX_DEPTH else max(least, min(most, 1 + int(self._random.random() * 3)))
        before: list[Any] = list(schema.get("prefixItems", ()))[:count]
        items = schema.get("items", {})
        return [self.value(before[index] if index < len(before) else items, depth + 1) for index in range(count)]

    def _number(self, schema: Mapping[str, Any], *, whole: bool) -> float | int:
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        if self._numbers:
            value = self._numbers[self._taken % len(self._numbers)]
            self._taken += 1
        else:
            value = float(int(self._random.random() * 100))
        step = schema.get("multipleOf") or (1 if whole else None)
        if low is not None:
            value = max(value, low + ((step or 0.5) if "minimum" not in schema else 0))
        if high is not None:
            value = min(value, high - ((step or 0.5) if "maximum" not in schema else 0))
        if step:
            value = round(value / step) * step
            value += step if low is not None and value < low else -step if high is not None and value > high else 0
        return int(value) if whole else float(value)

    def _string(self, schema: Mapping[str, Any]) -> str:
        form = _FORMATS.get(str(schema.get("format")))
        if form is not None:
            return form
        text: str = self._strings[self._taken % len(self._strings)]
        self._taken += 1
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        while len(text) < least:
            text += " " + self._strings[self._taken % len(self._strings)]
            self._taken += 1
        return text if most is None else text[: int(most)]

    def _one_of(self, values: Sequence[Any]) -> Any:
        text = self._text.lower()
        named = [value for value in values if isinstance(value, str) and value.lower() in text]
        return named[0] if named else values[int(self._random.random() * len(values))]

    def _simplest(self, choices: Sequence[Any], depth: int) -> Any:
        useful = [choice for choice in choices if not (isinstance(choice, Mapping) and choice.get("type") == "null")]
        if depth >= _MAX_DEPTH or not useful:
            return choices[-1] if any(choice not in useful for choice in choices) else choices[0]
        return useful[0]

    def _resolve(self, reference: str) -> Any:
        schema: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name, {}) if isinstance(schema, Mapping) else {}
        return schema


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call within the text of an answer."""

    name: str
    text: str
    # start, end: range of the arguments in `text`.
    start: int
    end: int


def json_text(
    response_format: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, prompt: str, random: Random
) -> str | None:
    """Return the text of a structured output; None if the request asks for none.

    Examples
    --------
    >>> json_text(None, {"choice": ["yes", "no"]}, "Answer yes or no.", Random(0))
    'yes'
    """
    schema: Any = None
    if response_format:
        if response_format.get("type") == "json_schema":
            schema = (response_format.get("json_schema") or {}).get("schema", _PLAIN)
        elif response_format.get("type") == "json_object":
            schema = _PLAIN
    elif outputs:
        if outputs.get("choice"):
            return str(SchemaValues({}, prompt, random).value({"enum": outputs["choice"]}))
        schema = outputs.get("json") or (_PLAIN if outputs.get("json_object") else None)
        if isinstance(schema, str):
            schema = orjson.loads(schema)
    if schema is None:
        return None
    return orjson.dumps(SchemaValues(schema, prompt, random).value(schema)).decode()


def tool_call(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any], prompt: str, random: Random
) -> ToolCall | None:
    """Return the model's tool call; None if it answers in words."""
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
    if isinstance(choice, Mapping):
        chosen = (choice.get("function") or {}).get("name")
        functions = [function for function in functions if function.get("name") == chosen]
    if not functions:
        return None
    words = {word.lower() for word in _WORD.findall(prompt)}
    shared = [len(words & _words_of(function)) for function in functions]
    if choice == "auto" and not max(shared):
        return None
    function = functions[shared.index(max(shared))]
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    arguments = orjson.dumps(SchemaValues(schema, prompt, random).value(schema)).decode()
    name = str(function.get("name"))
    if isinstance(choice, Mapping):
        before, after = "", ""
    elif choice == "required":
        before, after = f'[{{"name": "{name}", "parameters": ', "}]"
    else:
        before, after = f'<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"
    return ToolCall(name, before + arguments + after, len(before), len(before) + len(arguments))


def _words_of(function: Mapping[str, Any]) -> set[str]:
    description = f"{function.get('name', '')} {function.get('description', '')}".replace("_", " ")
    return {word.lower() for word in _WORD.findall(description) if len(word) > 3}
