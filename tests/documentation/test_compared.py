"""What the comparison says that the gateway does not do is checked against what the code has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.config.schema import pool_schema

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "compared.md"
_ABSENT = {
    "prefill and decode apart": r"prefill_(only|url|backends)|decode_|disaggregat",
    "caches outside the GPU": r"lmcache|offload|kv_transfer",
    "scorers as plugins in Go": r"\.go$",
    "loading of LoRA adapters": r"load_lora|lora_path|adapter_(url|path)",
    "gRPC to engines": r"grpc_url|engine_grpc",
    "tokenising of prompts": r"tokeni[sz]e_|chat_template$",
    "histories": r"histor(y|ies)|conversation_store",
    "MCP": r"\bmcp",
    "SGLang's engines": r"sglang|engine_kind",
    "other providers": r"provider|bedrock|anthropic_key|azure_",
    "budgets in money": r"budget_|usd|price_per|spend",
    "keys in a database": r"keys_(database|url)|key_store",
    "fallback to other models": r"fallback_models?$|other_models",
    "caching of answers": r"answer_cache|response_cache|cache_answers",
    "limits by any header": r"limit_header|limits_by",
    "HTTP/2 for clients": r"http2|\bh2\b|alpn",
}
"""By claim, what a setting, a folder or a file of the product would be called that has it."""


def _claims() -> list[str]:
    """Return the entries of the last column of the first table."""
    rows = re.findall(r"^\| \[.*\| ([^|]+) \|$", _PAGE.read_text("utf-8"), re.MULTILINE)
    assert rows
    return [claim.strip() for row in rows for claim in row.split(",")]


def _names(schema: Any) -> set[str]:
    """Return the names of all settings of a schema."""
    if isinstance(schema, list):
        return {name for each in schema for name in _names(each)}
    if not isinstance(schema, dict):
        return set()
    properties = schema.get("properties")
    own = set(properties) if isinstance(properties, dict) else set()
    return own.union(*(_names(each) for each in schema.values()))


def _features() -> set[str]:
    """Return the names of settings, folders and files of the packages that serve."""
    packages = (_ROOT / name for name in ("gateway", "policies", "backends"))
    paths = (path for package in packages for path in package.rglob("*") if "simulator" not in path.parts)
    return {path.name for path in paths if "__pycache__" not in path.parts} | _names(pool_schema())


@pytest.mark.parametrize("claim", sorted(set(_claims())))
def test_what_it_is_said_not_to_do_is_not_in_the_code(claim: str) -> None:
    assert claim in _ABSENT, f"{claim!r}: say in _ABSENT what it would be called in the code"
    found = sorted(name for name in _features() if re.search(_ABSENT[claim], name.lower()))
    assert not found, f"docs/compared.md says that the gateway does not do this: {claim}"


@pytest.mark.parametrize(
    ("was_claimed", "has"),
    [
        ("fairness between tenants", "tenant_header"),
        ("autoscaling", "fleet"),
        ("caches known from events", "kv_events"),
    ],
)
def test_features_are_seen(was_claimed: str, has: str) -> None:
    """What the page once said to be missing would be found."""
    assert has in _features(), was_claimed
    assert was_claimed not in json.dumps(_claims())
