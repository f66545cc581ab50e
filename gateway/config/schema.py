"""JSON schema of the pool file, for editors. The docstrings of the settings become its descriptions."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from backends.speculation import SpeculativeConfig
from gateway.config.pool_file import PoolFile
from gateway.config.settings import Settings
from policies.policy import policies

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_VARIABLE = {"type": "string", "pattern": r"\$\{"}  # `${PORT:-8080}` in place of a number
_SECTION = re.compile(r"^(\w+)\n-{3,}\n", re.MULTILINE)  # a heading of the NumPy docstring style


def schema_text() -> str:
    """Return the content of `config/pool.schema.json`."""
    return json.dumps(pool_schema(), indent=2) + "\n"


def pool_schema() -> dict[str, Any]:
    """Return the schema of a pool file, with the settings of every registered policy."""
    schema = PoolFile.model_json_schema()
    for definition in schema["$defs"].values():
        if "description" in definition:
            definition["description"] = _SECTION.split(definition["description"])[0].strip()
    models: list[type[BaseModel]] = [SpeculativeConfig, *_descendants(Settings)]
    for model in models:
        definition = schema if model is PoolFile else schema["$defs"].get(model.__name__)
        if definition is not None:
            _describe(definition, model)
    keys = schema["properties"]["keys"]
    keys["items"] = {"anyOf": [{"type": "string", "title": "Key"}, keys["items"]]}
    model = schema["$defs"]["ModelSettings"]["properties"]
    policy = model["policy"]
    model["policy"] = {"anyOf": [{"$ref": policy.pop("$ref")}, {"type": "string", "enum": list(policies())}], **policy}
    schema["$defs"]["BackendSettings"]["required"].remove("method")
    for name in ("BackendSettings", "DiscoverSettings"):
        limit = schema["$defs"][name]["properties"]["drafter_limit"]["anyOf"]
        limit.insert(0, schema["$defs"]["DrafterLimitSettings"]["properties"]["tokens"])
    _allow_variables(schema)
    return {"$schema": _DIALECT, **schema, "title": "Pool of the speculation gateway"}


def _descendants(settings: type[Settings]) -> Iterator[type[Settings]]:
    for model in settings.__subclasses__():
        yield model
        yield from _descendants(model)


def _describe(definition: dict[str, Any], model: type[BaseModel]) -> None:
    read = [
        _read_docstring(inspect.cleandoc(each.__doc__ or "")) for each in model.__mro__ if issubclass(each, BaseModel)
    ]
    definition["description"] = read[0][0]
    fields = {name: text for _, own in reversed(read) for name, text in own.items()}  # a base class may describe some
    for name, field in definition.get("properties", {}).items():
        field.pop("title", None)
        if name in fields:
            field["description"] = fields[name]


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the summary and the description of each parameter of an unindented docstring in NumPy style."""
    summary, *rest = _SECTION.split(text)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    descriptions: dict[str, str] = {}
    names: list[str] = []
    for line in sections.get("Parameters", "").splitlines():
        if line.strip() and not line.startswith(" "):
            names = [name.strip() for name in line.split(",")]
        else:
            descriptions |= {name: f"{descriptions.get(name, '')} {line.strip()}".strip() for name in names}
    return " ".join(summary.split()), descriptions


def _allow_variables(node: Any) -> None:
    """Accept `${...}` in place of every number, boolean and constrained string."""
    if isinstance(node, list):
        for item in node:
            _allow_variables(item)
    if not isinstance(node, dict):
        return
    for key, child in node.items():
        if key in {"properties", "$defs"}:
            for part in child.values():
                _allow_variables(part)
        elif key != "default":
            _allow_variables(child)
    if _is_constrained(node) and node != _VARIABLE:
        own = {key: node.pop(key) for key in list(node) if key not in {"default", "description", "title"}}
        node["anyOf"] = [own, dict(_VARIABLE)]


def _is_constrained(node: dict[str, Any]) -> bool:
    kind = node.get("type")
    return kind in ("integer", "number", "boolean") or (kind == "string" and ("enum" in node or "pattern" in node))
