"""`gateway trace show|convert|sample|anonymize`."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import orjson
import pytest

from gateway.rooms.recorder.hashes import TextHasher
from lab.simulation.request import engine_blocks
from lab.trace.read import FORMATS, read_trace
from lab.trace.record import TraceRecord
from lab.trace.write import WRITERS, write_trace
from tests.lab import invoked
from tests.support.paths import DATA, DOCS

AZURE = DATA / "AzureLLMInferenceTrace_code.csv"
PAGE = (DOCS / "replay.md").read_text("utf-8")


def run(*words: object, status: int = 0) -> tuple[str, str]:
    exit_status, printed, error = invoked.run("trace", *words)
    assert exit_status == status, error
    return printed, error


def own() -> list[TraceRecord]:
    """Return requests of ten sessions and two templates, one per second, the latest first."""
    return [
        TraceRecord(
            id=f"r{number}",
            arrived_at=1.7e9 + number,
            model="m",
            key="team",
            session=f"s{number % 10}",
            template=f"{number % 2:08x}",
            temperature=0.5,
            prompt_tokens=number,
            output_tokens=10,
            method="ngram",
            backend="b",
            error="" if number % 20 else "x y@z",
            acceptance={"ngram": [1, 3, 1, 1, 2, 1, 1, 1, 1, 1], "eagle3": 2.5},
            prompt="Who am I? " * 3,
            output="You are I? am",
            prefix_blocks=[1, number],
        )
        for number in reversed(range(200))
    ]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl.zst"
    write_trace(path, own())
    return path


def read(path: Path) -> list[TraceRecord]:
    return list(read_trace(path, strict=True))


def test_an_unknown_output_format_is_refused_with_the_known_ones(trace: Path, tmp_path: Path) -> None:
    _, error = run("convert", trace, tmp_path / "out.jsonl", "--to", "csv", status=2)
    assert f"unknown format 'csv'; the formats are {', '.join(WRITERS)}" in error
    shown = re.sub(r"\s", "", run("convert", "--help")[0])
    assert "|".join(FORMATS) in shown
    assert "|".join(WRITERS) in shown


@pytest.mark.slow
def test_show_summarizes_a_trace(trace: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    printed, _ = run("show", trace, "--json", figures)
    assert "200 requests" in printed
    assert "from 2023-11-14 22:13:20+00:00, 199.0 s, 1 requests/s\n" in printed
    assert "10 sessions" in printed
    assert re.search(r"prompt tokens +200 +99.5 +99.5 +179.1 +197 +199", printed)
    assert re.search(r"error +requests +share", printed)
    write_trace(trace, [*own(), *[TraceRecord(prompt_tokens=3)] * 400])
    assert "199.0 s, 1 requests/s, without 400 requests that have no time\n" in run("show", trace)[0]
    assert re.search(r"x y@z +10 +5.0%", printed)
    assert re.search(r"eagle3 +200 +2.50", printed)
    document = orjson.loads(figures.read_bytes())
    assert document["requests"] == document["texts"] == 200
    assert document["measures"]["prompt_tokens"]["p50"] == 99.5
    assert document["acceptance"][1]["mean"] == pytest.approx(10 / 7)
    assert document["prefix_blocks"] == 400
    assert document["prefix_reuse"] == pytest.approx(0.5, abs=0.02)


def test_the_times_of_errors_are_not_those_of_answers(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    answers = [TraceRecord(prompt_tokens=1, status=200, e2e_s=2.0), TraceRecord(prompt_tokens=1, e2e_s=4.0)]
    write_trace(path, [*answers, TraceRecord(prompt_tokens=1, status=404, error="client_error", e2e_s=0.001)])
    assert re.search(r"E2E, s +2 +3 +3 ", run("show", path)[0])


def test_show_reports_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt_tokens": 1}\n' + "broken\n" * 15)
    printed, errors = run("show", path)
    assert "1 requests, 15 broken lines" in printed
    assert "no times" in printed
    assert f"{path}:2: not JSON" in errors
    assert errors.count("skipped\n") == 10
    assert "15 broken lines skipped." in errors


@pytest.mark.parametrize("first_at", [-1e10, 1e7])
def test_times_that_are_no_date_are_shown_without_one(tmp_path: Path, first_at: float) -> None:
    path = tmp_path / "own.jsonl"
    write_trace(path, [TraceRecord(arrived_at=first_at, prompt_tokens=1)])
    printed, _ = run("show", path)
    assert "1 requests" in printed
    assert "from" not in printed


def test_blocks_may_be_hashes_of_64_bits(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    write_trace(path, [TraceRecord(prompt_tokens=2000, prefix_blocks=[2**64 - 1, 2**63 + 5, -(2**63)])] * 2)
    printed, _ = run("show", path)
    assert "6 prefix blocks, about 50% of them seen before" in printed
    blocks = engine_blocks(next(read_trace(path)))
    assert len(set(np.array(blocks, np.int64).tolist())) == len(blocks) > 64


def test_a_text_of_windows_loses_no_line(tmp_path: Path, trace: Path) -> None:
    run("convert", trace, tmp_path / "own.jsonl")
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + (tmp_path / "own.jsonl").read_bytes())
    assert [*read_trace(marked, strict=True)] == [*read_trace(trace)]


def test_errors_of_reading_and_writing(tmp_path: Path, trace: Path) -> None:
    assert "is being read" in run("convert", trace, trace, status=2)[1]
    assert "is being read" in run("convert", tmp_path, trace, status=2)[1]
    assert "cannot write the file" in run("convert", trace, tmp_path / "no" / "x", status=2)[1]
    assert read(trace) == own()


def test_convert_to_and_from_another_format(tmp_path: Path, trace: Path) -> None:
    mooncake, back = tmp_path / "mooncake.jsonl.gz", tmp_path / "back.jsonl"
    _, errors = run("convert", trace, mooncake, "--to", "mooncake", "--in-order")
    assert errors == f"200 requests written to {mooncake}\n"
    run("convert", mooncake, back, "--block-tokens", 512)
    records = read(back)
    assert [one.prompt_tokens for one in records] == list(range(200))
    assert [one.arrived_at for one in records] == [1.7e9 + number for number in range(200)]
    assert {one.output_tokens for one in records} == {10}
    _, errors = run("convert", AZURE, tmp_path / "x", "--to", "vllm", status=2)
    assert "no request has what vllm needs: a prompt" in errors
    assert not (tmp_path / "x").exists()
    write_trace(trace, [TraceRecord(prompt="Hello."), TraceRecord(prompt_tokens=5)])
    _, errors = run("convert", trace, tmp_path / "x", "--to", "vllm")
    assert errors == f"1 requests written to {tmp_path / 'x'}\n1 left out, which lack what vllm needs: a prompt\n"


@pytest.mark.parametrize("behind", ["/dev/null", "redirected.jsonl"])
def test_convert_writes_through_a_link(tmp_path: Path, behind: str) -> None:
    # The captured output has no /dev/stdout, so another link to a device or a file stands in for it.
    out = tmp_path / "printed"
    (tmp_path / behind).touch()
    out.symlink_to(behind)
    assert "40 requests" in run("convert", AZURE, out)[1]
    assert out.is_symlink()


def test_a_share_is_reproducible_and_contained_in_a_larger_one(tmp_path: Path, trace: Path) -> None:
    def sample(*options: object) -> list[str]:
        out = tmp_path / "out.jsonl"
        run("sample", trace, out, *options)
        return [one.id for one in read(out)]

    small, large = sample("--share", 0.2), sample("--share", 0.6)
    assert 15 < len(small) < 70
    assert set(small) < set(large)
    assert small == sample("--share", 0.2) != sample("--share", 0.2, "--seed", 1)
    assert large == [one.id for one in own() if one.id in set(large)]


def test_sessions_are_taken_whole(tmp_path: Path, trace: Path) -> None:
    out = tmp_path / "out.jsonl"
    run("sample", trace, out, "--share", 0.5, "--sessions", "--seed", 1)
    taken = Counter(record.session for record in read(out))
    assert 0 < len(taken) < 10
    assert set(taken.values()) == {20}


def test_the_first_requests_of_a_window_of_time(tmp_path: Path, trace: Path) -> None:
    out = tmp_path / "out.jsonl"
    run("sample", trace, out, "--start", 10, "--end", 13)
    assert [one.prompt_tokens for one in read(out)] == [12, 11, 10]
    run("sample", trace, out, "--start", 100, "--first", 2)
    assert [one.prompt_tokens for one in read(out)] == [199, 198]
    assert "give a number" in run("sample", trace, out, "--start", "nan", status=2)[1]
    assert "there is no request for it" in run("sample", trace, out, "--start", 1e6, status=2)[1]


def test_an_anonymized_trace_has_no_secrets_and_preserves_equality(tmp_path: Path, trace: Path) -> None:
    out = tmp_path / "out.jsonl"
    run("anonymize", trace, out, "--salt", "s")
    written = out.read_text()
    for secret in ("Who am I", "You are", "team", "x y@z", "1700000", '"s1"', "00000001", '"r1"'):
        assert secret not in written
    before, after = own(), read(out)
    for name in ("session", "template", "key", "id", "error"):
        renamed = dict(zip((getattr(one, name) for one in before), (getattr(one, name) for one in after), strict=True))
        assert len(set(renamed.values())) == len(renamed)
        assert [renamed[getattr(one, name)] for one in before] == [getattr(one, name) for one in after]
    blocks = [one.prefix_blocks for one in after]
    assert len({one[0] for one in blocks}) == 1
    assert len({one[1] for one in blocks}) == 200
    assert [one.arrived_at for one in after] == [float(number) for number in reversed(range(200))]
    assert {(one.error, len(one.acceptance), one.text) for one in after} == {("", 2, None), ("error", 2, None)}
    again = tmp_path / "again.jsonl"
    run("anonymize", trace, again, "--salt", "s")
    assert again.read_bytes() == out.read_bytes()
    run("anonymize", trace, again)
    assert not {one.id for one in read(again)} & {one.id for one in after}


def test_texts_can_be_replaced_by_hashes(tmp_path: Path, trace: Path) -> None:
    out = tmp_path / "out.jsonl"
    run("anonymize", trace, out, "--salt", "s", "--text", "hashes")
    record = read(out)[0]
    expected = TextHasher(b"s").hash_text("Who am I? " * 3, "You are I? am")
    assert (record.prompt_hashes, record.output_hashes, record.hashing) == expected
    assert (record.prompt, record.output, record.arrived_at) == ("", "", 199.0)


def test_every_field_and_format_is_documented() -> None:
    named = set(re.findall(r"`([a-z_0-9]+)`", PAGE))
    assert set(TraceRecord.__slots__) <= named
    assert set(FORMATS) <= named
    (shown,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert len(shown.splitlines()) == 1
    assert set(orjson.loads(shown)) <= {*TraceRecord.__slots__, "version"}
