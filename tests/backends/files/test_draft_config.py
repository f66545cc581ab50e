"""How long a context a draft serves, by its `config.json`: as vLLM 0.32 derives it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from backends.files.draft_config import context_note, context_of, longest_drafted, lowers_context
from backends.speculation import Method

HEAD = {"model_type": "llama", "max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (HEAD, 2048),
        (HEAD | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 8192),
        (HEAD | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 4096),
        (HEAD | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2048),
        (HEAD | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 2048),
        (HEAD | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 2048),
        (HEAD | {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 512}, 512),
        ({"speculators_model_type": "eagle3", "transformer_layer_config": HEAD}, 2048),
        ({"model_type": "some_vl", "text_config": HEAD}, 2048),
        ({"model_type": "medusa"}, None),
        (HEAD | {"max_position_embeddings": -1}, None),
        (HEAD | {"max_position_embeddings": 1e400}, None),
        (HEAD | {"rope_scaling": {"type": "linear", "factor": "much"}}, 2048),
        (HEAD | {"rope_scaling": [2.0]}, 2048),
        ({"text_config": "none"}, None),
        ([HEAD], None),
    ],
)
def test_the_length_that_a_configuration_allows(config: Any, tokens: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_of(tmp_path / "config.json") == tokens
    assert longest_drafted(Method.EAGLE3, {"model": str(tmp_path)}) == tokens
    assert longest_drafted(Method.EAGLE3, {"model": str(tmp_path), "max_model_len": 300}) == 300
    assert longest_drafted(Method.SUFFIX, {"model": str(tmp_path), "max_model_len": 300}) is None


def test_what_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert longest_drafted(Method.EAGLE3, {"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}) is None
    assert longest_drafted(Method.EAGLE3, {"model": "\0"}) is None
    assert longest_drafted(Method.MTP, {"num_speculative_tokens": 1}) is None
    os.mkfifo(path)
    assert context_of(path) is None  # nobody writes to it: reading would not end
    path.unlink()
    for text in (b"\xff", b"{", b"[" * 100_000, b" " * 2**21 + json.dumps(HEAD).encode()):
        path.write_bytes(text)
        assert context_of(path) is None


@pytest.mark.parametrize(
    ("method", "rope", "lowers"),
    [
        (Method.DRAFT_MODEL, None, True),
        (Method.EAGLE3, None, False),
        (Method.EAGLE3, "llama3", False),
        (Method.EAGLE3, "linear", False),
        (Method.EAGLE3, "yarn", True),
        (Method.EAGLE, "longrope", True),
        (Method.EAGLE3, "dynamic", True),
        (Method.EAGLE3, ["yarn"], False),
        (Method.SUFFIX, "yarn", False),
    ],
)
def test_which_drafters_shorten_the_context_of_their_engine(
    method: Method, rope: Any, lowers: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HEAD | {"rope_scaling": {"rope_type": rope, "factor": 2.0}}))
    config = {"model": str(tmp_path)}
    assert lowers_context(method, config) is lowers
    for version, says in (("", lowers), ("0.33.0", lowers), ("0.32.1", False)):
        notes = [*context_note(method, config, version, 2048)]
        assert notes == ["from vLLM 0.33 on its engine takes contexts of at most 2,048 tokens"] * says


def test_a_draft_that_cannot_be_read_shortens_only_as_a_model() -> None:
    for config in ({}, {"model": "org/draft"}):
        (note,) = context_note(Method.DRAFT_MODEL, config, "0.33.0+cpu", None)
        assert note.endswith("no longer than those of the draft model")
        assert not [*context_note(Method.EAGLE3, config, "0.33.0", 2048)]
