"""The longest context of a draft model, derived from its configuration as vLLM does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from backends.files.regular import read_file
from backends.reported import MOST_CONTEXT_TOKENS, finite, whole
from backends.speculation import MODELLESS, Method, Release, release_of

_MOST_BYTES: Final = 1 << 20
_INNER: Final = ("transformer_layer_config", "text_config")
"""Keys that hold the draft's own keys: in the format of vLLM's speculators, and in multimodal models."""
_LOWERS_CONTEXT: Final[Release] = (0, 33)
"""From this vLLM release on, a drafter with a shorter context shortens its engine's."""
_SCALED_ROPES: Final = frozenset({"yarn", "longrope", "su", "dynamic"})
"""Rotary embeddings with which heads shorten it; draft models always do."""


def longest_drafted(method: Method, speculative_config: Mapping[str, Any]) -> int | None:
    """Return the longest context for which vLLM drafts: as configured, else that of a draft in a local folder.

    An engine with a shorter context of its own never reaches it. None if there is no limit, or it is unknown.
    """
    model, most = speculative_config.get("model"), speculative_config.get("max_model_len")
    if method in MODELLESS:
        return None
    return whole(most, MOST_CONTEXT_TOKENS) or (context_of(Path(model, "config.json")) if model else None)


def context_note(
    method: Method, speculative_config: Mapping[str, Any], version: str, tokens: int | None
) -> Iterator[str]:
    """Yield a note if a drafter shortens its engine's context, to `tokens` if known."""
    release = release_of(version)
    if lowers_context(method, speculative_config) and (release is None or release >= _LOWERS_CONTEXT):
        most = f"of at most {tokens:,} tokens" if tokens else "no longer than those of the draft model"
        yield f"from vLLM 0.33 on its engine takes contexts {most}"


def lowers_context(method: Method, speculative_config: Mapping[str, Any]) -> bool:
    """Return whether a drafter with a shorter context shortens that of its engine, from vLLM 0.33 on."""
    model = speculative_config.get("model")
    if method in MODELLESS or not model:
        return method is Method.DRAFT_MODEL
    return method is Method.DRAFT_MODEL or _rope_of(_read(Path(model, "config.json")))[0] in _SCALED_ROPES


def context_of(path: Path) -> int | None:
    """Return the longest context that a `config.json` allows; None if it cannot be read or does not say."""
    config = _read(path)
    tokens = whole(config.get("max_position_embeddings"), MOST_CONTEXT_TOKENS)
    kind, factor = _rope_of(config)
    if tokens and kind in {"linear", "dynamic"}:  # other kinds are already in the length, or do not change it
        tokens = int(tokens * factor)
    elif tokens and kind in {"longrope", "su"}:
        tokens = whole(config.get("original_max_position_embeddings"), MOST_CONTEXT_TOKENS) or tokens
    return tokens or None


def _read(path: Path) -> Mapping[str, Any]:
    """Return the draft's own keys in a `config.json`; empty if it cannot be read."""
    try:
        config = orjson.loads(read_file(path, _MOST_BYTES))
    except (OSError, ValueError):
        return {}
    for inner in _INNER:
        if isinstance(config, dict):
            config = config.get(inner, config)
    return config if isinstance(config, dict) else {}


def _rope_of(config: Mapping[str, Any]) -> tuple[str, float]:
    """Return the kind and the factor of a draft's rotary embeddings."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict):
        return "", 1.0
    return str(rope.get("rope_type", rope.get("type"))), finite(rope.get("factor"), MOST_CONTEXT_TOKENS) or 1.0
