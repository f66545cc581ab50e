"""How long a context a draft model serves, by its configuration, as vLLM derives it from that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from backends.files.regular import read_file
from backends.reported import MOST_CONTEXT_TOKENS, finite, whole
from backends.speculation import MODELLESS, Method

_MOST_BYTES: Final = 1 << 20
_INNER: Final = ("transformer_layer_config", "text_config")
"""What holds the draft's own keys: in the format of vLLM's speculators, and in models that do not only read text."""


def longest_drafted(method: Method, speculative_config: Mapping[str, Any]) -> int | None:
    """Return the longest context for which vLLM drafts: the one that was set, else that of a draft in a local folder.

    An engine whose own context is shorter has no such limit. None if there is none, or it is not known.
    """
    model, most = speculative_config.get("model"), speculative_config.get("max_model_len")
    if method in MODELLESS:
        return None
    return whole(most, MOST_CONTEXT_TOKENS) or (context_of(Path(model, "config.json")) if model else None)


def context_of(path: Path) -> int | None:
    """Return the longest context that a `config.json` allows; None if it cannot be read or does not say."""
    try:
        config = orjson.loads(read_file(path, _MOST_BYTES))
    except (OSError, ValueError):
        return None
    for inner in _INNER:
        if isinstance(config, dict):
            config = config.get(inner, config)
    tokens = whole(config.get("max_position_embeddings"), MOST_CONTEXT_TOKENS) if isinstance(config, dict) else None
    rope = tokens and (config.get("rope_parameters") or config.get("rope_scaling"))
    if tokens and isinstance(rope, dict):
        kind = rope.get("rope_type", rope.get("type"))
        if kind in {"linear", "dynamic"}:  # other kinds are part of the length already, or none of it
            tokens = int(tokens * (finite(rope.get("factor"), MOST_CONTEXT_TOKENS) or 1.0))
        elif kind in {"longrope", "su"}:
            tokens = whole(config.get("original_max_position_embeddings"), MOST_CONTEXT_TOKENS) or tokens
    return tokens or None
