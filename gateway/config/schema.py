"""The pool file's JSON schema, for editors: from the settings themselves, their docstrings as the explanations."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from backends.speculation import SpeculativeConfig
from gateway.config.settings import PoolSettings, Settings

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_VARIABLE = {"type": "string", "pattern": r"\$\{"}  # `${PORT:-8080}` where a number is expected


def schema_text() -> str:
    """Return the schema as it stands in `config/pool.schema.json`."""
    return json.dumps(pool_schema(), indent=2) + "\n"


def pool_schema() -> dict[str, Any]:
    """Return the schema of a pool file, every policy that is registered in it."""
    schema = PoolSettings.model_json_schema()
    for model in _models():
        definition = schema if model is PoolSettings else schema["$defs"].get(model.__name__)
        if definition is not None:
            _explain(definition, model)
    keys = schema["properties"]["keys"]
    keys["items"] = {"anyOf": [{"type": "string", "title": "Key"}, keys["items"]]}
    _take_variables(schema)
    return {"$schema": _DIALECT, **schema, "title": "Pool of the speculation gateway"}


def _models() -> Iterator[type[BaseModel]]:
    yield SpeculativeConfig
    yield from Settings.__subclasses__()


def _explain(definition: dict[str, Any], model: type[BaseModel]) -> None:
    summary, fields = _read_docstring(inspect.cleandoc(model.__doc__ or ""))
    definition["description"] = summary
    for name, field in definition.get("properties", {}).items():
        field.pop("title", None)
        if name in fields:
            field["description"] = fields[name]


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the summary and the explanation of each parameter of a docstring in NumPy style.

    Cleaned first: Python 3.13 takes the indentation off docstrings, those before it leave it.
    """
    head, _, parameters = text.partition("Parameters\n----------\n")
    explained: dict[str, str] = {}
    names: list[str] = []
    for line in parameters.splitlines():
        if line.strip() and not line.startswith(" "):
            names = [name.strip() for name in line.split(",")]
        else:
            explained |= {name: f"{explained.get(name, '')} {line.strip()}".strip() for name in names}
    return " ".join(head.split()), explained


def _take_variables(node: Any) -> None:
    """Let `${...}` stand wherever a number, a truth value or a text of some form is expected."""
    if isinstance(node, list):
        for item in node:
            _take_variables(item)
    if not isinstance(node, dict):
        return
    for key, child in node.items():
        if key in {"properties", "$defs"}:
            for part in child.values():
                _take_variables(part)
        elif key != "default":
            _take_variables(child)
    if _is_bound(node) and node != _VARIABLE:
        own = {key: node.pop(key) for key in list(node) if key not in {"default", "description", "title"}}
        node["anyOf"] = [own, dict(_VARIABLE)]


def _is_bound(node: dict[str, Any]) -> bool:
    kind = node.get("type")
    return kind in ("integer", "number", "boolean") or (kind == "string" and ("enum" in node or "pattern" in node))
