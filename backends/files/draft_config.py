"""How long a context a draft model serves, by its configuration, as vLLM derives it from that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from backends.files.yaml import read_text
from backends.reported import MOST_CONTEXT_TOKENS, finite, whole
from backends.speculation import MODELLESS, Method

_MOST_BYTES: Final = 1 << 20
_INNER: Final = ("transformer_layer_config", "text_config")
"""What holds the draft's own keys: in the format of vLLM's speculators, and in models that do not only read text."""
_LENGTHS: Final = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
_SCALED: Final = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})
"""Kinds of RoPE whose scaling is part of these lengths already, or is none of the length."""


def longest_drafted(method: Method, speculative_config: Mapping[str, Any]) -> int | None:
    """Return the longest context for which vLLM drafts: the one that was set, else that of a draft in a local folder.

    An engine whose own context is shorter has no such limit. None if there is none, or it is not known.
    """
    if method in MODELLESS:
        return None
    if most := whole(speculative_config.get("max_model_len"), MOST_CONTEXT_TOKENS):
        return most
    model = speculative_config.get("model")
    return context_of(Path(model, "config.json")) if isinstance(model, str) and model else None


def context_of(path: Path) -> int | None:
    """Return the longest context that a `config.json` allows; None if it cannot be read or does not say."""
    try:
        config = orjson.loads(read_text(path, _MOST_BYTES))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    config = next((config[key] for key in _INNER if isinstance(config.get(key), dict)), config)
    lengths = {key: length for key in _LENGTHS if (length := whole(config.get(key), MOST_CONTEXT_TOKENS))}
    if not lengths:
        return None
    tokens = float(lengths.get("model_max_length") or min(lengths.values()))
    factor = 1.0
    for rope in _ropes(config):
        kind = rope.get("rope_type") or rope.get("type")
        if kind in {"su", "longrope"}:
            return whole(config.get("original_max_position_embeddings"), MOST_CONTEXT_TOKENS) or int(tokens)
        if kind not in _SCALED and "gemma3" not in str(config.get("model_type")):
            factor = finite(rope.get("factor"), MOST_CONTEXT_TOKENS) or factor
    return min(MOST_CONTEXT_TOKENS, int(tokens * factor))


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of RoPE: of all layers, or of each kind of layers."""
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := config.get(key), dict):
            yield from [each for each in rope.values() if isinstance(each, dict)] or [rope]
