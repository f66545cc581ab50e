"""Comparisons on real vLLM: n-gram drafting against none, on text that repeats itself and on text that does not.

By chance, a verdict is wrong once in a hundred comparisons at most.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from tests.support.command import ADMIN_KEY
from tests.support.paths import ROOT
from tests.support.waiting import eventually_blocking
from tests.vllm.conftest import START_S, Served, serve

pytestmark = [pytest.mark.vllm, pytest.mark.slow]  # minutes of traffic, until it is certain

POOL = "tests/vllm/pool.compare.yaml"
PREDICTS = False
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
BLOCK_S = 5.0
ASKING = 2
"""Requests at once; each must take less than an eighth of a block."""
TOKENS = 10, 250
PROMPT_TOKENS = 64
SAME_TOKEN = 65
MOST_S = 400.0
"""It was decided after three minutes on two cores that six others worked on."""
ENDS_S = 20.0


REPEATS: dict[str, Any] = {"temperature": 0, "max_tokens": 32, "allowed_token_ids": [SAME_TOKEN]}


@contextmanager
def traffic(served: Served, body: dict[str, Any]) -> Iterator[None]:
    """Ask until the block ends; no request may fail."""
    over = threading.Event()

    def ask(seed: int) -> None:
        random = Random(seed)
        while not over.is_set():
            prompt = [random.randrange(*TOKENS) for _ in range(PROMPT_TOKENS)]
            asked = {"model": "tiny", "prompt": prompt, "ignore_eos": True, **body}
            served.http.post(f"{served.url}/v1/completions", json=asked).raise_for_status()

    with ThreadPoolExecutor(ASKING) as executor:
        asking = [executor.submit(ask, seed) for seed in range(ASKING)]
        try:
            yield
        finally:
            over.set()
        for each in asking:
            each.result()


def better(served: Served, body: dict[str, Any]) -> str:
    """Compare both replicas under requests until that is decided; return the method that is better."""

    def found() -> dict[str, Any]:
        answer = served.http.get(f"{served.url}/admin/compare", headers=ADMIN).raise_for_status()
        document: dict[str, Any] = answer.json()["models"]["tiny"]
        return document

    with traffic(served, body):
        question = {"a": "baseline", "b": "ngram", "block_s": BLOCK_S, "for_s": MOST_S}
        served.http.post(f"{served.url}/admin/compare/start", json=question, headers=ADMIN).raise_for_status()
        eventually_blocking(lambda: found()["stage"] != "running", MOST_S + ENDS_S)
    document = found()
    assert document["stage"] == "decided", document["sentence"]
    (finding,) = document["findings"]
    assert finding["at_mean"]["high"] < 1.0
    return str(finding["better"])


def test_ngram_is_better_on_text_that_repeats_itself(served: Served) -> None:
    assert better(served, REPEATS) == "ngram"


def test_no_drafting_is_better_on_free_text(served: Served) -> None:
    """Nearly each token is somewhere in the prompt, so that n-gram drafts what is not accepted."""
    assert better(served, {"temperature": 1, "max_tokens": 16}) == "baseline"


def test_a_replica_that_tries_ngram_keeps_it_if_it_is_better(installed: Path, tmp_path: Path) -> None:
    document = yaml.safe_load((ROOT / POOL).read_text())
    backends = document["models"]["tiny"]["backends"]
    lookup, backends["lookup"] = backends["lookup"], backends["plain"]
    pool = tmp_path / "pool.yaml"
    pool.write_text(yaml.safe_dump(document))
    config = json.dumps({"method": "ngram", **lookup["speculative_config"]})
    command = [str(Path(sys.executable).with_name("gateway")), "canary", "--replica", "lookup", "--with", config]
    with serve(tmp_path, str(pool)) as served:
        served.warm_up()
        command += ["--url", served.url, "--admin-key", ADMIN_KEY, "--block", f"{BLOCK_S:g}s", "--for", f"{MOST_S:g}s"]
        with traffic(served, REPEATS):
            ran = subprocess.run(command, capture_output=True, text=True, timeout=START_S + MOST_S, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "Keep it" in ran.stdout
        assert served.backends()["lookup"]["method"] == "ngram"
