"""Another method for a backend, in pool files as people write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.speculation import Method
from backends.validation import UsageError
from gateway.config.load import load_pool
from lab.autopilot.pool_text import rewrite

POOL = """\
# The pool of the team.
models:
  llama: # the only one
    policy: {name: round_robin} # for now
    backends:
      plain:
        method: baseline  # none
        # on the first GPU
        serve: &engine {model: org/llama, env: {TOKEN: "${TOKEN:-x}"}}
      lookup:
        method: ngram
        speculative_config:
          num_speculative_tokens: 3
          prompt_lookup_max: 4 # tuned
        # on the second
        serve: *engine
      head: {method: eagle3, speculative_config: {num_speculative_tokens: 3, model: org/head}, serve: *engine}
      far: {url: "http://far:8000", method: suffix}
keys: [{name: team, key: "${KEY:-k}"}] # the end
"""


@pytest.mark.parametrize("name", ["plain", "lookup", "head", "far"])
@pytest.mark.parametrize(
    ("method", "config"),
    [
        (Method.BASELINE, {}),
        (Method.SUFFIX, {}),
        (Method.NGRAM, {"num_speculative_tokens": 5, "prompt_lookup_max": 4}),
        (Method.EAGLE3, {"num_speculative_tokens": 2, "model": "org/other: head"}),
    ],
)
def test_only_method_and_config_change(tmp_path: Path, name: str, method: Method, config: dict[str, Any]) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(POOL)
    path.chmod(0o640)
    before = load_pool(path, {})
    rewrite(path, "llama", name, method, config)
    after = load_pool(path, {})
    changed = after.models["llama"].backends[name]
    assert changed.method is method
    found = changed.speculative_config
    assert (found.model_dump(exclude_unset=True) if found else {}) == config
    others = set(before.models["llama"].backends) - {name}
    assert all(after.models["llama"].backends[one] == before.models["llama"].backends[one] for one in others)
    assert (after.keys, after.models["llama"].backends[name].serve) == (
        before.keys,
        before.models["llama"].backends[name].serve,
    )
    lines, text = POOL.splitlines(), path.read_text()
    kept = [line for line in lines if "#" in line and not (name == "lookup" and "tuned" in line)]
    assert all(line.partition("#")[2] in text for line in kept), text
    assert (path.stat().st_mode & 0o777, list(tmp_path.iterdir())) == (0o640, [path])


def test_there_and_back_reads_as_before(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(POOL)
    rewrite(path, "llama", "plain", Method.NGRAM, {"num_speculative_tokens": 5, "prompt_lookup_max": 4})
    rewrite(path, "llama", "plain", Method.BASELINE, {})
    assert path.read_text() == POOL


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("      far: {", "      twin: *head\n      far: {", "shares its lines"),
        ("method: eagle3, ", "<<: {method: eagle3}, ", "no `method` of its own"),
    ],
)
def test_what_cannot_be_changed_alone_is_left_as_it_is(tmp_path: Path, old: str, new: str, why: str) -> None:
    path = tmp_path / "pool.yaml"
    text = POOL.replace("head: {", "head: &head {") if "twin" in new else POOL
    path.write_text(text.replace(old, new))
    before = path.read_text()
    with pytest.raises(UsageError, match=why):
        rewrite(path, "llama", "head", Method.SUFFIX, {})
    with pytest.raises(UsageError, match="not written out"):
        rewrite(path, "llama", "nobody", Method.SUFFIX, {})
    assert (path.read_text(), list(tmp_path.iterdir())) == (before, [path])
