"""Schedules written into the text of a pool file."""

from __future__ import annotations

import pytest
import yaml

from backends.validation import UsageError
from lab.schedule.edit import with_speculation

POOL = """\
# ours
models:
  llama: # a model
    backends:
      plain: {method: baseline}
      head: # drafts
        method: eagle3
        speculative_config: {num_speculative_tokens: 3, model: a-head} # as trained
      block:
          method: eagle3
          speculative_config:
              # few
              num_speculative_tokens: ${K:-3} # for now
              num_speculative_tokens_per_batch_size:
                - [1, 8, 3]
                - [9, 64, 1] # a guess
              # the rest
              model: a-head
"""
SCHEDULE = [[1, 8, 5], [9, 256, 2]]
VALUES = {"num_speculative_tokens": 5, "num_speculative_tokens_per_batch_size": SCHEDULE}


def test_only_the_values_change() -> None:
    changed = with_speculation(POOL, "llama", {"head": VALUES, "block": VALUES})
    before, after = yaml.safe_load(POOL), yaml.safe_load(changed)
    for name in ("head", "block"):
        assert after["models"]["llama"]["backends"][name].pop("speculative_config") == {**VALUES, "model": "a-head"}
        del before["models"]["llama"]["backends"][name]["speculative_config"]
    assert after == before
    comments = [line.partition("#")[2] for line in POOL.splitlines() if "#" in line]
    assert [line.partition("#")[2] for line in changed.splitlines() if "#" in line] == comments
    kept = [line for line in POOL.splitlines() if "num_spec" not in line and "- [" not in line]
    assert [line for line in kept if line not in changed.splitlines()] == []


def test_a_new_key_follows_in_a_block() -> None:
    pool = (
        "models:\n  m:\n    backends:\n      a:\n        speculative_config:\n          num_speculative_tokens: 3 # k\n"
    )
    changed = with_speculation(pool, "m", {"a": VALUES})
    assert yaml.safe_load(changed)["models"]["m"]["backends"]["a"]["speculative_config"] == VALUES
    assert changed.endswith("          num_speculative_tokens_per_batch_size: [[1, 8, 5], [9, 256, 2]] # k\n")


def test_sections_elsewhere_are_refused() -> None:
    backends = "{a: {speculative_config: &k {num_speculative_tokens: 3}}, b: {speculative_config: *k}}"
    shared = f"models: {{m: {{backends: {backends}}}}}"
    with pytest.raises(UsageError, match="a and b share"):
        with_speculation(shared, "m", {"a": VALUES, "b": VALUES})
    merged = "models: {m: {backends: {a: {speculative_config: {<<: {num_speculative_tokens: 3}}}}}}"
    with pytest.raises(UsageError, match="by hand"):
        with_speculation(merged, "m", {"a": VALUES})
