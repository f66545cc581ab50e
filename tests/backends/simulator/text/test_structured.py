"""Values generated for a schema conform to it."""

from __future__ import annotations

from typing import Any

import jsonschema
import orjson
import pytest

from backends.simulator.text.structured import json_text, tool_call

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 12},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "mood": {"enum": ["happy", "sad"]},
        "kind": {"const": "person"},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 4},
        "home": {"$ref": "#/$defs/place"},
        "id": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"label": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/leaf"}}},
    "required": ["label", "children"],
    "$defs": {"leaf": {"type": "object", "properties": {"label": {"type": "string"}}}},
}
TOOLS = [
    {"type": "function", "function": {"name": "send_mail", "description": "Send an email", "parameters": PERSON}},
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "kelvin"]}},
            },
        },
    },
]


def made(schema: dict[str, Any], prompt: str) -> Any:
    return orjson.loads(json_text({"type": "json_schema", "json_schema": {"schema": schema}}, prompt) or "")


@pytest.mark.parametrize("schema", [PERSON, TREE, {"type": "array", "items": {"type": "integer"}}, {}])
@pytest.mark.parametrize("prompt", ["", "Alice, 130 years old, lives in 'Paris' and is happy -3 times."])
def test_values_are_valid(schema: dict[str, Any], prompt: str) -> None:
    jsonschema.validate(made(schema, prompt), schema)


def test_values_are_taken_from_the_prompt() -> None:
    person = made(PERSON, "I am 'Zoe', 41, sad")
    assert (person["name"], person["age"], person["mood"]) == ("Zoe", 41, "sad")


def test_other_kinds_of_structured_output() -> None:
    assert json_text(None, "") is None
    assert json_text({"type": "text"}, "") is None
    assert isinstance(orjson.loads(json_text({"type": "json_object"}, "") or ""), dict)


def test_auto_calls_no_tool_if_none_matches() -> None:
    assert tool_call(TOOLS, "auto", "Tell me a joke") is None
    assert tool_call(TOOLS, "required", "Tell me a joke") is not None
    assert tool_call(TOOLS, {"type": "function", "function": {"name": "nothing"}}, "weather") is None
