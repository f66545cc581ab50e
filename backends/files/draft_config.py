"""How long a context a draft model serves, by its configuration, as vLLM derives it from that."""

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
"""What holds the draft's own keys: in the format of vLLM's speculators, and in models that do not only read text."""
_LOWERS_CONTEXT: Final[Release] = (0, 33)
"""The release of vLLM from which on a drafter with a shorter context shortens that of its engine."""
_SCALED_ROPES: Final = frozenset({"yarn", "longrope", "su", "dynamic"})
"""Rotary embeddings with which heads do so; draft models always do."""


def longest_drafted(method: Method, speculative_config: Mapping[str, Any]) -> int | None:
    """Return the longest context for which vLLM drafts: the one that was set, else that of a draft in a local folder.

    An engine whose own context is shorter has no such limit. None if there is none, or it is not known.
    """
    model, most = speculative_config.get("model"), speculative_config.get("max_model_len")
    if method in MODELLESS:
        return None
    return whole(most, MOST_CONTEXT_TOKENS) or (context_of(Path(model, "config.json")) if model else None)


def context_note(
    method: Method, speculative_config: Mapping[str, Any], version: str, tokens: int | None
) -> Iterator[str]:
    """Yield that a drafter, which serves some tokens if that is known, shortens its engine's context, if it does so."""
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
    if tokens and kind in {"linear", "dynamic"}:  # other kinds are part of the length already, or none of it
        tokens = int(tokens * factor)
    elif tokens and kind in {"longrope", "su"}:
        tokens = whole(config.get("original_max_position_embeddings"), MOST_CONTEXT_TOKENS) or tokens
    return tokens or None


def _read(path: Path) -> Mapping[str, Any]:
    """Return the draft's own keys of a `config.json`; none if it cannot be read."""
    try:
        config = orjson.loads(read_file(path, _MOST_BYTES))
    except (OSError, ValueError):
        return {}
    for inner in _INNER:
        if isinstance(config, dict):
            config = config.get(inner, config)
    return config if isinstance(config, dict) else {}


def _rope_of(config: Mapping[str, Any]) -> tuple[str, float]:
    """Return the kind of a draft's rotary embeddings, and their factor."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict):
        return "", 1.0
    return str(rope.get("rope_type", rope.get("type"))), finite(rope.get("factor"), MOST_CONTEXT_TOKENS) or 1.0
