"""Every fuzzing target, on the inputs that are kept for it and on drawn ones; `scripts/fuzz` runs them for longer."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from backends.files.yaml import read_yaml
from lab.trace.lines import TraceError
from lab.trace.read import read_trace
from tests.fuzz.kept import TARGETS, inputs
from tests.fuzz.targets import answers
from tests.fuzz.wire import run
from tests.support.paths import ROOT


def fuzz_one(target: str) -> Callable[[bytes], None]:
    function: Callable[[bytes], None] = importlib.import_module(f"tests.fuzz.targets.{target}").fuzz_one
    return function


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_kept_inputs(target: str) -> None:
    check = fuzz_one(target)
    kept = inputs(target)
    assert kept
    for path in kept:
        check(path.read_bytes())


@pytest.mark.parametrize(
    "stream", [b"HTTP/1.1 020 OK\r\ncontent-length: 2\r\n\r\nok", b"HTTP/1.1 199 OK\r\ncontent-length: 2\r\n\r\nok"]
)
def test_answers_to_be_refused(stream: bytes) -> None:
    ((ended, _, _),) = run(answers.calls([stream], head_only=False, takes_whole=False, calls=1))
    assert ended in {"garbage", "broken"}


def test_more_than_an_answer_in_a_read_closes_the_connection() -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    stray = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n"
    outcomes = run(answers.calls([answer + stray, b"\r\nstray"], head_only=False, takes_whole=False, calls=2))
    assert ("end", 200, b"stray") not in outcomes


def test_a_number_beyond_all_floats_is_an_issue() -> None:
    ((_, issue),) = read_yaml("a: " + "1:" * 400 + "1.5", {}).issues
    assert "looks like a number" in issue.message


def test_a_list_in_a_file_cut_short_is_a_trace_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.zst"
    path.write_bytes(zstandard.compress(b"[]")[:-1])
    with pytest.raises(TraceError):
        list(read_trace(path, format="sharegpt", strict=True))


def test_counts_that_json_cannot_hold_are_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt_tokens": 99999999999999999999999}\n')
    with pytest.raises(TraceError, match="at most 2\\^64"):
        list(read_trace(path, format="gateway", strict=True))


def test_the_script_fuzzes_every_target() -> None:
    runs = re.search(r"runs=\((.*)\)", (ROOT / "scripts/fuzz").read_text())
    assert runs
    assert sorted(re.findall(r"\[(\w+)\]=", runs[1])) == sorted(TARGETS)
