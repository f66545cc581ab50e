"""Traces in every format, read to the same records."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import orjson
import pytest

from lab.trace import (
    WRITTEN_FORMATS,
    BrokenLine,
    Hashing,
    Speculation,
    TraceCandidate,
    TraceError,
    TraceRecord,
    decode,
    detect_format,
    encode,
    read_trace,
    write_trace,
)
from lab.trace.decode import OUTCOME_FIELDS
from lab.trace.features import features_of
from policies.features.request import Endpoint, RequestFeatures
from tests.support.paths import DATA

FULL = TraceRecord(
    id="r-1",
    arrived_at=1763700000.25,
    model="m",
    endpoint="chat",
    key="team",
    session="s",
    template="0a1b2c3d",
    workload="code",
    temperature=0.0,
    top_p=0.9,
    max_tokens=64,
    n=2,
    stream=False,
    prompt_tokens=100,
    output_tokens=5,
    cached_tokens=16,
    turns=3,
    overlap=0.25,
    code_share=0.5,
    structured=True,
    estimated=True,
    tools=False,
    baseline_only=("min_p",),
    qps=1.5,
    in_flight=4,
    policy="learned",
    reason="fastest",
    backend="b",
    method="ngram",
    propensity=0.9,
    retried_from="a",
    rescued_from="c",
    rescued_at=3,
    candidates=(TraceCandidate("a", "baseline", 2.5, 0.1, 3, 2, 1), TraceCandidate("b", "ngram", None, 0.9)),
    status=200,
    error="interrupted",
    ttft_s=0.1,
    itl=[0.02, 0.03],
    e2e_s=0.5,
    queue_s=0.01,
    spec=Speculation(8, 3, 2, 2.5),
    acceptance={"ngram": [1, 2, 1, 2, 1], "eagle3": 2.25},
    prompt_token_ids=[1, 2, 3],
    output_token_ids=[4, 5],
    prompt="say",
    messages=[{"role": "user", "content": "say"}],
    output="hello",
    prompt_hashes=[7],
    output_hashes=[8, 9],
    hashing=Hashing("piece", 2, "00ff00ff"),
    prefix_blocks=[11, 12],
    think_time_s=3.5,
    block_tokens=16,
)


def read(path: Path, **options: object) -> tuple[list[TraceRecord], list[BrokenLine]]:
    broken: list[BrokenLine] = []
    return list(read_trace(path, report=broken.append, **options)), broken  # type: ignore[arg-type]


def lines(path: Path, *documents: object) -> Path:
    path.write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in documents))
    return path


def test_every_field_survives_writing_and_reading() -> None:
    defaults = TraceRecord()
    assert all(getattr(FULL, name) != getattr(defaults, name) for name in FULL.__slots__ if name != "version")
    assert decode(orjson.loads(encode(FULL)), 1) == FULL


def test_what_became_of_a_request_need_not_be_read() -> None:
    document = orjson.loads(encode(FULL))
    unread = {name: getattr(TraceRecord(), name) for name in OUTCOME_FIELDS}
    assert decode(document, 1, outcomes=False) == replace(FULL, **unread)
    assert decode(document | {"candidates": 2}, 1, outcomes=False) == replace(FULL, **unread)
    assert {field.name for field in fields(FULL)} > OUTCOME_FIELDS


def test_candidates_are_columns_since_version_3_and_objects_before() -> None:
    written = orjson.loads(encode(FULL))
    assert written["version"] == 3
    assert written["candidates"] == {
        "backend": ["a", "b"],
        "method": ["baseline", "ngram"],
        "prediction_s": [2.5, None],
        "propensity": [0.1, 0.9],
        "in_flight": [3, None],
        "running": [2, None],
        "waiting": [1, None],
    }
    names = list(written["candidates"])
    rows = [dict(zip(names, row, strict=True)) for row in zip(*written["candidates"].values(), strict=True)]
    of_old = [{name: value for name, value in row.items() if value is not None} for row in rows]
    for version in (1, 2):
        hashes = {"prompt_hashes": [7], "output_hashes": [8, 9]}
        record = decode(written | hashes | {"version": version, "candidates": of_old}, 1)
        assert record == replace(FULL, version=version)
        assert orjson.loads(encode(record)) == written
    assert "running" not in orjson.loads(encode(replace(FULL, candidates=[TraceCandidate("a")])))["candidates"]


def test_a_mean_acceptance_length_is_written_by_its_name() -> None:
    acceptance = orjson.loads(encode(FULL))["acceptance"]
    assert acceptance == {"ngram": [1, 2, 1, 2, 1], "eagle3": {"mean_acceptance_length": 2.25}}


def test_missing_and_unknown_keys_are_ignored() -> None:
    document = {
        "arrived_at": 3,
        "prompt_tokens": 9,
        "output_tokens": 4,
        "temperature": 0.7,
        "acceptance": {"ngram": [1]},
    }
    record = decode({**document, "model": None, "of_another_version": {"x": [1]}}, 17)
    assert record == TraceRecord(
        id="17", arrived_at=3.0, prompt_tokens=9, output_tokens=4, temperature=0.7, acceptance={"ngram": [1]}
    )


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (5, 5.0),
        ("5.5", 5.5),
        ("2023-11-16T18:17:03.9799600", 1700158623.97996),
        ("2023-11-16 18:17:03Z", 1700158623.0),
        ("2023-11-16T20:17:03+02:00", 1700158623.0),
    ],
)
def test_times_are_seconds_or_iso(written: object, seconds: float) -> None:
    assert decode({"arrived_at": written, "prompt_tokens": 1}, 1).arrived_at == seconds


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "neither prompt_tokens nor a prompt"),
        ({"prompt_tokens": -1}, "prompt_tokens: expected a whole number"),
        ({"prompt_tokens": 1.5}, "prompt_tokens: expected a whole number"),
        ({"prompt_tokens": True}, "prompt_tokens: expected a number, not true or false"),
        ({"prompt_tokens": 1, "temperature": "hot"}, "temperature: expected a number, not a text"),
        ({"prompt_tokens": 1, "propensity": 1.5}, "propensity: expected 0 to 1"),
        ({"prompt_tokens": 1, "arrived_at": "yesterday"}, "arrived_at: expected seconds or an ISO 8601 time"),
        ({"prompt_tokens": 1, "output_token_ids": ["a"]}, "output_token_ids: expected a list of whole numbers"),
        ({"prompt_tokens": 1, "acceptance": {"ngram": "x"}}, "acceptance: ngram: expected a number"),
        ({"prompt_tokens": 1, "candidates": [{"method": "ngram"}]}, "candidates: a candidate without backend"),
        ({"prompt_tokens": 1, "candidates": {"method": ["ngram"]}}, "candidates: candidates without backends"),
        ({"prompt_tokens": 1, "candidates": {"backend": ["a"], "running": [1, 2]}}, "running: expected a list of 1"),
        ({"prompt_tokens": 1, "candidates": {"backend": ["a"], "propensity": [2]}}, "propensity: expected 0 to 1"),
        ({"prompt_tokens": 1, "candidates": 2}, "candidates: expected columns or a list"),
        ({"prompt_tokens": 1, "version": 99}, "version 99 of the schema"),
    ],
)
def test_invalid_records_are_rejected(fields: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode(fields, 1)


def test_missing_lengths_come_from_ids_and_texts() -> None:
    assert decode({"prompt_token_ids": [1, 2, 3], "output_token_ids": [4]}, 1).output_tokens == 1
    assert decode({"prompt": [5, 6], "output": "x" * 40}, 1).prompt_token_ids == [5, 6]
    text = decode({"prompt": "x" * 400, "output": "é" * 20}, 1)
    assert (text.prompt_tokens, text.output_tokens) == (105, 10)
    counted = decode({"messages": [{"role": "user", "content": "a b c"}]}, 1, lambda text: len(text.split()))
    assert counted.prompt_tokens == 3
    assert counted.output_tokens is None


def test_a_step_emits_at_least_one_token() -> None:
    assert decode({"prompt_tokens": 1, "acceptance": {"NGRAM": [0, 3, 1.0]}}, 1).acceptance == {"ngram": [1, 3, 1]}


def test_the_text_for_drafting_is_ids_or_hashes() -> None:
    assert FULL.text is not None
    assert FULL.text.exact
    hashed = TraceRecord(prompt_hashes=[1], output_hashes=[2], hashing=Hashing("token", 2))
    assert hashed.text is not None
    assert not hashed.text.exact
    assert TraceRecord(prompt="only text").text is None


def test_a_record_has_the_features_that_the_policy_saw() -> None:
    known = RequestFeatures(
        "m", Endpoint.COMPLETIONS, stream=True, n=2, temperature=0.3, top_p=0.9, overlap=0.5, code_share=0.2,
        prompt_tokens=77, max_tokens=50, template="0a1b2c3d", turns=3, structured=True, tools=True,
        baseline_only=("min_p",), qps=2.5, in_flight=4, workload="code",
    )  # fmt: skip
    names = [name for name in TraceRecord.__dataclass_fields__ if name in RequestFeatures.__dataclass_fields__]
    assert features_of(TraceRecord(**{name: getattr(known, name) for name in names})) == known


def test_hashes_are_packed_or_numbers() -> None:
    packed = encode(TraceRecord(prompt_hashes=[1, 2**24 - 1], output_hashes=[2**24]))
    assert b'"prompt_hashes":"AAAB////"' in packed
    assert b'"output_hashes":[16777216]' in packed  # as version 1 has them
    read_again = decode(orjson.loads(packed), 1)
    assert (read_again.prompt_hashes, read_again.output_hashes) == ([1, 2**24 - 1], [2**24])
    of_2 = decode({"version": 2, "prompt_tokens": 1, "prompt_hashes": "AQAAAP////8=", "output_hashes": [2]}, 1)
    assert (of_2.prompt_hashes, of_2.output_hashes) == ([1, 2**32 - 1], [2])
    assert decode(orjson.loads(encode(of_2)), 1) == replace(of_2, version=3)
    for version, wrong in ((3, "AAAB///"), (3, "AQ=="), (3, "ä"), (2, "AAAB"), (2, "AQAAAP////8")):
        with pytest.raises(ValueError, match="prompt_hashes: expected hashes"):
            decode({"prompt_tokens": 1, "version": version, "prompt_hashes": wrong}, 1)


def test_azure(tmp_path: Path) -> None:
    records, broken = read(DATA / "AzureLLMInferenceTrace_code.csv")
    assert (len(records), broken) == (40, [])
    assert records[0] == TraceRecord(
        id="2", arrived_at=1700158623.97996, workload="code", prompt_tokens=4808, output_tokens=10
    )
    later = tmp_path / "AzureLLMInferenceTrace_conv_1week.csv"
    later.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n")
    assert read(later)[0] == [
        TraceRecord(id="2", arrived_at=1715299200.00993, workload="chat", prompt_tokens=2162, output_tokens=5)
    ]


def test_burstgpt(tmp_path: Path) -> None:
    path = tmp_path / "BurstGPT.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\r\n"
        "5,17,2.1,ChatGPT,472,18,490,Conversation log\r\n"
        "45.5,,1,GPT-4,1087,0,1087,API log\r\n"
    )
    assert read(path)[0] == [
        TraceRecord("2", 5.0, "ChatGPT", session="17", workload="chat", prompt_tokens=472, output_tokens=18, e2e_s=2.1),
        TraceRecord("3", 45.5, "GPT-4", prompt_tokens=1087, output_tokens=0, error="failed", e2e_s=1.0),
    ]


def test_mooncake() -> None:
    records, broken = read(DATA / "mooncake_synthetic_trace.jsonl")
    rows = [json.loads(line) for line in (DATA / "mooncake_synthetic_trace.jsonl").read_text().splitlines()]
    assert broken == []
    assert [one.prefix_blocks for one in records] == [row["hash_ids"] for row in rows]
    assert [one.arrived_at for one in records] == [row["timestamp"] / 1000 for row in rows]
    assert {one.block_tokens for one in records} == {512}


CONVERSATION = {
    "id": "c",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "q" * 40},
        {"from": "gpt", "value": "a" * 80},
        {"from": "human", "value": "more"},
        {"from": "gpt", "value": "b" * 20},
    ],
}


@pytest.mark.parametrize("as_list", [True, False])
def test_sharegpt(tmp_path: Path, as_list: bool) -> None:
    path = tmp_path / "conversations.json"
    entries = [CONVERSATION, {"id": "broken"}, {"conversations": []}]
    path.write_bytes(orjson.dumps(entries) if as_list else b"".join(orjson.dumps(one) + b"\n" for one in entries))
    first, second = read(path)[0]
    assert (first.id, first.session, first.turns, first.prompt_tokens, first.output_tokens) == ("c/1", "c", 1, 12, 20)
    assert (second.id, second.session, second.turns, second.prompt_tokens) == ("c/2", "c", 3, 33)
    assert second.messages[-1] == {"role": "user", "content": "more"}
    assert second.output == "b" * 20
    assert [one.number for one in read(path)[1]] == [2]


def test_vllm_bench(tmp_path: Path) -> None:
    path = lines(tmp_path / "custom.jsonl", {"prompt": "Say hello.", "output_tokens": 12}, {"prompt": "And?"})
    assert detect_format(path) == "vllm"
    records, _ = read(path)
    assert [(one.prompt, one.output_tokens) for one in records] == [("Say hello.", 12), ("And?", None)]


def test_the_format_is_detected_after_a_broken_line_and_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text('{"broken\n{"timestamp": 0, "input_length": 5, "output_length": 1}\n')
    assert detect_format(path) == "mooncake"
    records, broken = read(path, format="gateway")
    assert records == []
    assert [one.number for one in broken] == [1, 2]
    with pytest.raises(ValueError, match="unknown format 'x'"):
        read(path, format="x")
    path.write_text("a,b\n1,2\n")
    with pytest.raises(TraceError, match="unknown format; give one of"):
        read(path)
    with pytest.raises(TraceError, match="must name the columns TIMESTAMP, ContextTokens, GeneratedTokens"):
        read(path, format="azure")


def test_broken_lines_are_reported_with_their_number_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"prompt_tokens": 1, "arrived_at": 0}\n\n{"prompt_tok\n[]\n{"prompt_tokens": "x"}\n{"prompt_tokens": 2}'
    )
    records, broken = read(path)
    assert [(one.id, one.prompt_tokens) for one in records] == [("1", 1), ("6", 2)]
    assert [one.number for one in broken] == [3, 4, 5]
    assert str(broken[2]) == f"{path}:5: prompt_tokens: expected a number, not a text"
    with pytest.raises(TraceError, match=r"t\.jsonl:3: not JSON"):
        list(read_trace(path, strict=True))


def test_broken_lines_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "1,2,3",
        "",
        "1,x,3",
        "caf\xe9",
        "9,8,7,6",
        ",1,1",
        "3,-1,1",
        '"4","5","6"',
    ]
    path.write_bytes("\r\n".join(rows).encode("latin-1"))
    records, broken = read(path)
    assert [(one.id, one.arrived_at, one.prompt_tokens) for one in records] == [
        ("2", 1.0, 2),
        ("6", 9.0, 8),
        ("9", 4.0, 5),
    ]
    assert [one.number for one in broken] == [4, 5, 7, 8]
    with pytest.raises(TraceError, match=r"t\.csv:4: expected a time and two whole numbers: 1,x,3"):
        list(read_trace(path, strict=True))


@pytest.mark.parametrize("form", WRITTEN_FORMATS)
def test_every_format_can_be_written_and_read(tmp_path: Path, form: str) -> None:
    path = tmp_path / "out"
    record = TraceRecord(
        "1",
        1700158623.25,
        "m",
        workload="chat",
        prompt_tokens=7,
        output_tokens=9,
        messages=FULL.messages,
        output="hello",
    )
    bare = TraceRecord()
    assert write_trace(path, [record, bare, record], form) == ((3, 0) if form == "gateway" else (2, 1))
    assert detect_format(path) == form
    records, broken = read(path)
    assert broken == []
    assert len(records) == (3 if form == "gateway" else 2)
    for one in (records[0], records[-1]):
        assert one.output_tokens == (1 if form == "sharegpt" else 9)  # estimated from the text
        assert one.arrived_at == (None if form in ("sharegpt", "vllm") else record.arrived_at)


def test_a_file_is_replaced_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("before")

    def records():  # type: ignore[no-untyped-def]
        yield FULL
        raise KeyError

    with pytest.raises(KeyError):
        write_trace(path, records())
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TraceError, match="cannot write the file"):
        write_trace(tmp_path / "no" / "x", [FULL])
