"""What holds for every format of traces, and what each of them says (samples: tests/data/README.md)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard

from backends.validation import UsageError
from lab.simulation.request import replay_request
from lab.trace.decode import encode
from lab.trace.formats.format import Units
from lab.trace.lines import BrokenLine, TraceError
from lab.trace.read import FORMATS, detect_format, read_trace
from lab.trace.record import TraceRecord
from lab.trace.write import WRITERS, write_trace
from tests.support.paths import DATA

MADE_UP = DATA / "made_up"
SESSION = json.loads((MADE_UP / "weka.json").read_text())
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


def lines(*documents: object) -> bytes:
    return b"".join(orjson.dumps(one) + b"\n" for one in documents)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "q" * 40}]},
    {"role": "assistant", "content": "a" * 80},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "b" * 20},
]
BODY = {"model": "m", "messages": CHAT[:2], "temperature": 0.5}
SPENT = {
    "call_type": "acompletion", "prompt_tokens": 20, "completion_tokens": 10, "endTime": "2026-01-05 10:00:09.000Z",
    "completionStartTime": "2026-01-05 10:00:03.750Z", "model": "hosted_vllm/m", "cache_hit": "False", "messages": {},
}  # fmt: skip
SAMPLES = {
    "gateway": b"".join(encode(TraceRecord(str(n), 9.0 - n, prompt_tokens=5, output_tokens=n)) for n in range(3)),
    "azure": (DATA / "AzureLLMInferenceTrace_code.csv").read_bytes(),
    "burstgpt": (MADE_UP / "burstgpt_2.csv").read_bytes(),
    "mooncake": (DATA / "mooncake_synthetic_trace.jsonl").read_bytes(),
    "bailian": (MADE_UP / "bailian.jsonl").read_bytes(),
    "weka": lines(SESSION, {**SESSION, "id": "session-b"}, {**SESSION, "id": "session-c"}),
    "sharegpt": lines(CONVERSATION, {**CONVERSATION, "id": "d"}, {**CONVERSATION, "id": "e"}),
    "aiperf": lines(
        {"session_id": "s1", "timestamp": 0, "input_length": 600, "output_length": 60, "hash_ids": [1, 2]},
        {"session_id": "s1", "delay": 2000, "input_length": 700, "output_length": 60, "hash_ids": [1, 3]},
        {"session_id": "s2", "timestamp": 100, "text_input": "Say hello.", "output_length": 60},
        {"session_id": "s2", "delay": 1500, "text_input": "And once more.", "output_length": 60},
    ),
    "litellm": lines(*(SPENT | {"request_id": f"r{n}", "startTime": f"2026-01-05 10:00:0{n}.25Z"} for n in range(3))),
    "openai_batch": lines(
        *(
            {"custom_id": f"b{n}", "method": "POST", "url": "/v1/chat/completions", "body": BODY | {"max_tokens": n}}
            for n in range(3)
        )
    ),
    "messages": lines(*({"messages": CHAT[: 2 + n]} for n in range(3))),
    "vllm": lines({"prompt": "Say hello.", "output_tokens": 12}, {"prompt": "And?"}, {"prompt": "Bye."}),
}
PACKERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstandard.compress}

every_format = pytest.mark.parametrize("form", FORMATS)


def read(path: Path, **options: object) -> tuple[list[TraceRecord], list[BrokenLine]]:
    broken: list[BrokenLine] = []
    return list(read_trace(path, report=broken.append, **options)), broken  # type: ignore[arg-type]


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "trace"
    path.write_bytes(content)
    return path


def test_every_format_has_a_sample() -> None:
    assert set(SAMPLES) == set(FORMATS)


@every_format
def test_a_sample_is_recognised_and_read_whole(tmp_path: Path, form: str) -> None:
    path = written(tmp_path, SAMPLES[form])
    assert detect_format(path) == form
    records, broken = read(path)
    assert broken == []
    assert len(records) >= 3
    assert len({record.id for record in records}) == len(records)
    assert records == read(path, format=form)[0]


@every_format
@pytest.mark.parametrize("packed", PACKERS)
def test_compression_is_detected_from_the_content(tmp_path: Path, form: str, packed: str) -> None:
    plain = read(written(tmp_path, SAMPLES[form]))[0]
    path = written(tmp_path, PACKERS[packed](SAMPLES[form]))
    assert detect_format(path) == form
    assert [(one.arrived_at, one.prompt_tokens) for one in read(path)[0]] == [
        (one.arrived_at, one.prompt_tokens) for one in plain
    ]


@every_format
def test_a_broken_line_is_reported_with_its_number_and_skipped(tmp_path: Path, form: str) -> None:
    whole = read(written(tmp_path, SAMPLES[form]))[0]
    first, second, *rest = SAMPLES[form].splitlines(keepends=True)
    path = written(tmp_path, b"".join([first, second, b"\n", b"{broken\n", *rest]))
    records, broken = read(path)
    assert [one.prompt_tokens for one in records] == [one.prompt_tokens for one in whole]
    assert [(one.path, one.number) for one in broken] == [(path, 4)]
    with pytest.raises(TraceError, match=r"/trace:4: "):
        list(read_trace(path, strict=True))


@every_format
def test_a_damaged_file_is_read_up_to_there(tmp_path: Path, form: str) -> None:
    whole = [one.prompt_tokens for one in read(written(tmp_path, SAMPLES[form]))[0]]
    path = written(tmp_path, gzip.compress(SAMPLES[form])[:-12])
    records, broken = read(path, format=form)
    assert [one.prompt_tokens for one in records] == whole[: len(records)]
    assert "damaged from here on" in broken[-1].why
    with pytest.raises(TraceError, match="the file is damaged from here on"):
        list(read_trace(path, format=form, strict=True))


@every_format
def test_no_line_is_held_beyond_a_bound(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.trace.lines.MAX_LINE_BYTES", 1 << 20)
    path = written(tmp_path, SAMPLES[form] + b" " * (1 << 20) + b"\n" + SAMPLES[form])
    records, broken = read(path, format=form)
    assert len(records) == len(read(written(tmp_path, SAMPLES[form]))[0])
    assert "longer than 1 MiB: not a trace" in broken[-1].why


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_what_is_written_can_be_read(tmp_path: Path, form: str, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    record = TraceRecord("1", 1700158623.25, prompt_tokens=7, output_tokens=9, prompt="hello")
    assert write_trace(path, [record, TraceRecord(), record], form) == ((3, 0) if form == "gateway" else (2, 1))
    assert detect_format(path) == form
    records, broken = read(path)
    assert broken == []
    assert len(records) == (3 if form == "gateway" else 2)
    assert {one.output_tokens for one in (records[0], records[-1])} == {9}


def test_the_format_is_detected_after_a_broken_line_and_can_be_given(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"broken\n{"timestamp": 0, "input_length": 5, "output_length": 1}\n')
    assert detect_format(path) == "mooncake"
    with pytest.raises(TraceError, match=r"no line could be read as gateway: .*/trace:1: not JSON"):
        read(path, format="gateway")
    with pytest.raises(ValueError, match="unknown format 'x'"):
        read(path, format="x")
    path.write_text("a,b\n1,2\n")
    with pytest.raises(TraceError, match="unknown format; give one of"):
        read(path)
    with pytest.raises(TraceError, match="must name the columns TIMESTAMP, ContextTokens, GeneratedTokens"):
        read(path, format="azure")


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("5", 5.0),
        ("5.5", 5.5),
        ("2023-11-16T18:17:03.9799600", 1700158623.97996),  # UTC unless it names a zone
        ("2023-11-16 18:17:03Z", 1700158623.0),
        ("2023-11-16T20:17:03+02:00", 1700158623.0),
    ],
)
def test_times_are_seconds_or_iso(tmp_path: Path, given: str, seconds: float) -> None:
    table = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{given},1,1\n".encode()
    for content in (table, lines({"arrived_at": given, "prompt_tokens": 1})):
        assert read(written(tmp_path, content))[0][0].arrived_at == seconds


@pytest.mark.parametrize("unit", [1e-3, 1e-6, 1e-9])
def test_times_that_cannot_be_seconds_are_refused(tmp_path: Path, unit: float) -> None:
    path = written(tmp_path, lines({"arrived_at": round(1767268800 / unit), "prompt_tokens": 1}))
    with pytest.raises(TraceError, match="milliseconds or less"):
        read(path)


@pytest.mark.parametrize("more", [{}, {"chat_id": 1, "parent_chat_id": -1}])
def test_a_time_with_a_unit_is_a_number(tmp_path: Path, more: dict[str, int]) -> None:
    document = {"timestamp": "2026-01-01T00:00:00Z", "input_length": 9, "output_length": 2, **more}
    with pytest.raises(TraceError, match="expected a number, not a text"):
        read(written(tmp_path, lines(document)))


def test_azure_says_lengths_and_in_its_name_the_workload() -> None:
    records, _ = read(DATA / "AzureLLMInferenceTrace_code.csv")
    assert len(records) == 40
    assert records[0] == TraceRecord("2", 1700158623.97996, workload="code", prompt_tokens=4808, output_tokens=10)


def test_lines_of_a_table_that_are_wrong(tmp_path: Path) -> None:
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "1,2,3", "", "1,x,3", "caf\xe9", "9,8,7,6", ",1,1", "3,-1,1"]
    rows.append(f"3,{2**64},1")
    records, broken = read(written(tmp_path, "\r\n".join([*rows, '"4","5","6"']).encode("latin-1")))
    assert [(one.id, one.arrived_at, one.prompt_tokens) for one in records] == [
        ("2", 1.0, 2),
        ("6", 9.0, 8),
        ("10", 4.0, 5),
    ]
    assert [one.number for one in broken] == [4, 5, 7, 8, 9]
    assert broken[0].why == "expected a time and two whole numbers: 1,x,3"


def test_burstgpt_says_models_sessions_and_failures(tmp_path: Path) -> None:
    records, _ = read(MADE_UP / "burstgpt_2.csv")
    assert [(one.session, one.e2e_s, one.error) for one in records] == [
        ("3b1c", 4.0, ""),
        ("77e0", 1.0, "failed"),
        ("3b1c", 6.0, ""),
        ("", 2.0, ""),
    ]
    first = b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\r\n"
    assert read(written(tmp_path, first + b"5,ChatGPT,472,18,490,Conversation log\r\n"))[0] == [
        TraceRecord("2", 5.0, "ChatGPT", workload="chat", prompt_tokens=472, output_tokens=18)
    ]


def test_mooncake_says_prefixes() -> None:
    records, _ = read(DATA / "mooncake_synthetic_trace.jsonl")
    rows = [json.loads(line) for line in (DATA / "mooncake_synthetic_trace.jsonl").read_text().splitlines()]
    assert [one.prefix_blocks for one in records] == [row["hash_ids"] for row in rows]
    assert [one.arrived_at for one in records] == [row["timestamp"] / 1000 for row in rows]
    assert {one.block_tokens for one in records} == {512}


def test_bailian_says_conversations_and_prefixes() -> None:
    records, _ = read(MADE_UP / "bailian.jsonl")
    assert [(one.session, one.turns) for one in records] == [("10", 1), ("11", 1), ("10", 3), ("10", 5), ("14", 7)]
    assert [one.workload for one in records] == ["chat", "code", "chat", "chat", "search"]
    assert [one.arrived_at for one in records] == [0.0, 0.75, 9.5, 21.25, 30.0]
    third = replay_request(records[3], 0.0, 1.0)
    assert len(third.prefix_blocks) == 7  # 120 tokens fill seven blocks of 16
    first, other, second = (list(records[number].prefix_blocks) for number in (0, 1, 2))
    assert list(third.prefix_blocks[:5]) == second[:5]
    assert first[:2] == second[:2]
    assert first[0] == other[0]
    assert third.features.prefix_tokens[:2] == (16, 32)


def test_the_same_block_after_another_one_is_no_common_prefix(tmp_path: Path) -> None:
    good = json.loads((MADE_UP / "bailian.jsonl").read_text().splitlines()[0])
    path = written(tmp_path, lines(*({**good, "hash_ids": ids} for ids in ([5, 6], [4, 6], [5, 6, 7]))))
    one, other, longer = (list(record.prefix_blocks) for record in read(path)[0])
    assert not {*one} & {*other}
    assert longer[:2] == one
    assert all(0 <= number < 2**63 for number in longer)


def test_a_session_of_a_coding_agent() -> None:
    records, _ = read(MADE_UP / "weka.json")  # indented, on many lines
    assert [(one.id, one.session, one.arrived_at, one.model, one.stream, one.think_time_s) for one in records] == [
        ("session-a/1", "session-a", 0.0, "made-up-large", True, None),
        ("session-a/2", "session-a", 5.0, "made-up-large", False, 3.0),
        ("session-a/search/1", "session-a/search", 8.0, "made-up-small", True, None),
        ("session-a/search/2", "session-a/search", 9.5, "made-up-small", True, 0.5),
        ("session-a/4", "session-a", 12.0, "made-up-large", True, 5.5),
    ]
    first, *_, last = records
    assert (first.ttft_s, first.e2e_s, first.tools, first.workload, first.block_tokens) == (0.5, 2.0, True, "code", 64)
    assert list(last.prefix_blocks[:4]) == list(first.prefix_blocks)


@pytest.mark.parametrize("scope", ["local", "global"])
def test_the_blocks_of_sessions_are_their_own_unless_they_are_global(tmp_path: Path, scope: str) -> None:
    records, _ = read(written(tmp_path, lines(*({**SESSION, "id": name, "hash_id_scope": scope} for name in "ab"))))
    own, others = ({n for one in records if one.id.startswith(name) for n in one.prefix_blocks} for name in "ab")
    assert len(own) == len(others) == 12
    assert (own == others) == (scope == "global")
    assert bool(own & others) == (scope == "global")
    assert max(own | others) < 2**61  # still a whole number of 64 bits when split into the engine's blocks


def test_sub_agents_count_from_their_marker_or_from_the_beginning(tmp_path: Path) -> None:
    session = json.loads((MADE_UP / "weka.json").read_text())
    for request in session["requests"][2]["requests"]:
        request["t"] += 8.0
    assert [one.arrived_at for one in read(written(tmp_path, lines(session)))[0]] == [0.0, 5.0, 8.0, 9.5, 12.0]


def test_requests_of_a_session_that_are_wrong(tmp_path: Path) -> None:
    session = json.loads((MADE_UP / "weka.json").read_text())
    requests = session["requests"]
    requests[1]["in"] = "many"
    del requests[2]["requests"][0]["out"]
    requests[3]["hash_ids"] = [1, 2**28]
    nested: dict[str, object] = {"t": 1.0, "type": "subagent", "requests": []}
    for _ in range(9):
        nested = {"t": 1.0, "type": "subagent", "requests": [nested]}
    requests += [17, nested]
    records, broken = read(written(tmp_path, lines(session, {"requests": 5})))
    assert [one.id for one in records] == ["session-a/1", "session-a/search/2"]
    assert [one.why for one in broken] == [
        "request 2 of session-a: expected a number, not a text",
        "request 1 of session-a/search: has no 'out'",
        "request 4 of session-a: hash_ids: numbers within one session must be below 2^28",
        "request 5 of session-a: expected an object, not 17",
        "request 1 of session-a/6/1/1/1/1/1/1/1: a sub-agent needs a list 'requests', and at most 8 others around it",
        "a session must be an object with a list 'requests'",
    ]


@pytest.mark.parametrize("as_list", [True, False])
def test_each_answer_of_a_conversation_is_a_request(tmp_path: Path, as_list: bool) -> None:
    entries = [CONVERSATION, {"id": "broken"}, {"conversations": []}]
    (first, second), broken = read(written(tmp_path, orjson.dumps(entries) if as_list else lines(*entries)))
    assert (first.id, first.session, first.turns, first.prompt_tokens, first.output_tokens) == ("c/1", "c", 1, 12, 20)
    assert (second.id, second.session, second.turns, second.prompt_tokens) == ("c/2", "c", 3, 33)
    assert second.messages[-1] == {"role": "user", "content": "more"}
    assert second.output == "b" * 20
    assert [one.number for one in broken] == [2]


def test_messages_on_lines_of_their_own_are_a_conversation_of_bounded_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.trace.formats.conversations._MOST_ALONE", 2)
    said = [("user", "a"), ("user", None), ("assistant", "b"), ("user", "c")]
    records, broken = read(written(tmp_path, lines(*({"role": role, "content": text} for role, text in said))))
    assert [(one.id, one.messages, one.output) for one in records] == [("1/1", [{"role": "user", "content": "a"}], "b")]
    assert [(one.number, one.why) for one in broken] == [
        (2, "a turn without text"),
        (4, "more than 2 messages on lines of their own"),
    ]


def test_vllm_says_prompts_and_lengths(tmp_path: Path) -> None:
    records, _ = read(written(tmp_path, SAMPLES["vllm"]))
    assert [(one.prompt, one.output_tokens) for one in records] == [("Say hello.", 12), ("And?", None), ("Bye.", None)]


@pytest.mark.parametrize("form", ["mooncake", "sharegpt", "weka", "vllm", "bailian"])
def test_a_field_of_another_type_breaks_its_line_alone(tmp_path: Path, form: str) -> None:
    (whole, *_) = SAMPLES[form].splitlines(keepends=True)
    document = orjson.loads(whole)
    strange: list[object] = [None, [[]], {"a": [1]}, "9" * 5000, -1, [10**18]]
    inner = document.get("conversations") or document.get("requests") or [{}]
    lines_of = [lines({**document, key: value}) for key in document for value in strange]
    for name in ("conversations", "requests"):
        if name in document:
            lines_of += [lines({**document, name: [{**inner[0], key: value}]}) for key in inner[0] for value in strange]
    path = written(tmp_path, b"".join([*lines_of, whole]))
    records, _ = read(path, format=form, units=Units("ms", 512) if form == "mooncake" else Units())
    assert records[-1].prompt_tokens == read(written(tmp_path, whole), format=form)[0][-1].prompt_tokens


def test_turns_of_a_session_follow_the_answers_before_them(tmp_path: Path) -> None:
    records, _ = read(written(tmp_path, SAMPLES["aiperf"]))
    assert [(one.session, one.arrived_at, one.think_time_s) for one in records] == [
        ("s1", 0.0, None), ("s1", 2.0, 2.0), ("s2", 0.1, None), ("s2", 1.6, 1.5),
    ]  # fmt: skip
    assert [one.prompt for one in records] == ["", "", "Say hello.", "And once more."]
    turns = [{"text": "Say hello."}, {"text": "And once more.", "delay": 500, "output_length": 5}]
    records, _ = read(written(tmp_path, lines({"session_id": "a", "turns": turns}, {"turns": turns})))
    assert [one.think_time_s for one in records] == [None, 0.5, None, 0.5]
    assert len({one.session for one in records}) == 2
    [alone] = read(written(tmp_path, lines({"text": "Say hello."})))[0]
    assert (alone.prompt, alone.output_tokens) == ("Say hello.", None)


def test_what_a_proxy_logged_has_times_and_what_its_cache_answered_took_no_engine(tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [
        {"cache_hit": "True"},
        {"call_type": "aembedding"},
        {"status": "failure"},
        {"messages": CHAT[:2]},
    ]
    path = written(tmp_path, orjson.dumps([SPENT | {"startTime": "2026-01-05 10:00:03.500Z"} | one for one in others]))
    assert detect_format(path) == "litellm"
    cached, embedded, failed, told = read(path)[0]
    assert (cached.ttft_s, cached.e2e_s, cached.stream, cached.output_tokens) == (0.25, 5.5, True, 10)
    assert [cached.endpoint, embedded.endpoint, told.endpoint] == ["other", "embeddings", "chat"]
    assert (failed.error, len(told.messages)) == ("failed", 2)


def test_a_batch_says_prompts_and_limits(tmp_path: Path) -> None:
    records, _ = read(written(tmp_path, SAMPLES["openai_batch"]))
    assert [(one.id, one.max_tokens, one.output_tokens) for one in records] == [
        ("b0", 0, None),
        ("b1", 1, None),
        ("b2", 2, None),
    ]
    assert (records[0].endpoint, records[0].temperature, records[0].prompt_tokens > 10) == ("chat", 0.5, True)
    line = {"custom_id": "c", "method": "POST", "url": "/v1/responses", "body": {"model": "m", "input": "Say hello."}}
    [record] = read(written(tmp_path, lines(line)))[0]
    assert (record.prompt, record.endpoint) == ("Say hello.", "responses")
    # The answer is not known: as many tokens as usual, or as are allowed.
    assert [replay_request(one, 0.0, 1.0).output_tokens for one in (*records, record)] == [1, 1, 2, 220]


@pytest.mark.parametrize(
    ("content", "model"),
    [
        (lines({"messages": CHAT, "model": "m"}), "m"),
        (orjson.dumps([{"messages": CHAT, "model": None}]), ""),
        (orjson.dumps([CHAT]), ""),
        (orjson.dumps(CHAT), ""),
        (lines(*CHAT), ""),
    ],
    ids=["lines", "list", "list of lists", "one list", "a message per line"],
)
def test_each_answer_among_messages_is_a_request(tmp_path: Path, content: bytes, model: str) -> None:
    path = written(tmp_path, content)
    assert detect_format(path) == "messages"
    first, second = read(path)[0]
    assert (first.model, second.model) == (model, model)
    assert (first.turns, first.prompt_tokens, first.output_tokens, first.output) == (1, 12, 20, "a" * 80)
    assert (second.turns, second.prompt_tokens, second.output_tokens) == (3, 33, 5)


def test_turns_of_tools_and_images_stay_in_a_conversation(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://a/b.png"}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "a" * 80}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "q" * 40}, image]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r" * 40},
        {"role": "assistant", "content": "b" * 20},
    ]
    (first, second), broken = read(written(tmp_path, lines({"messages": turns})))
    assert (first.prompt_tokens, first.output_tokens, first.output) == (1010, 20, "a" * 80)
    assert (second.prompt_tokens, second.messages, broken) == (1040, turns[:3], [])
    named = [{"from": "human", "value": "q"}, {"from": "function_call", "value": "a" * 80}]
    [third] = read(written(tmp_path, lines({"conversations": named})))[0]
    assert third.output_tokens == 20


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ({"prompt_tokens": 5, "messages": {}, "completion_tokens": 5, "createdAt": "now"}, None),
        ({"prompt_tokens": 5, "mine": 1}, None),
        ({"prompt_tokens": 5, "output_tokens": 2, "mine": 1}, "gateway"),
        ({"version": 3, "prompt_tokens": 5, "mine": 1, "yours": 2}, "gateway"),
        ({"prompt": "a", "output_tokens": 2}, "vllm"),
        ({"input_length": 5, "output_length": 2}, None),
    ],
)
def test_a_format_is_known_by_all_of_its_keys(tmp_path: Path, document: dict[str, object], found: str | None) -> None:
    path = written(tmp_path, lines(document))
    if found is not None:
        assert detect_format(path) == found
        return
    with pytest.raises(TraceError, match="unknown format"):
        detect_format(path)


def hashed(times: list[float], block: int) -> bytes:
    """Return a trace with block hashes whose prompts grow."""
    lengths = [3000 + 700 * n for n in range(len(times))]
    rows = zip(times, lengths, strict=True)
    return lines(
        *(
            {"timestamp": at, "input_length": size, "output_length": 9, "hash_ids": list(range(-(-size // block)))}
            for at, size in rows
        )
    )


@pytest.mark.parametrize("unit_s", [1, 30])
def test_times_that_cannot_be_milliseconds_are_asked_for(tmp_path: Path, unit_s: float) -> None:
    path = written(tmp_path, hashed([0.25 * n * unit_s for n in range(9)], 512))
    if unit_s == 1:
        with pytest.raises(
            TraceError, match="4,000 requests a second in milliseconds, and 4 in seconds: say --time-unit"
        ):
            read(path)
    assert read(path, units=Units(time_unit="s"))[0][8].arrived_at == 2.0 * unit_s
    assert read(path, units=Units(time_unit="ms"))[0][8].arrived_at == 0.002 * unit_s


@pytest.mark.parametrize(("block", "fits"), [(16, "16"), (64, "64"), (1024, "1024"), (512, ""), (100, None)])
def test_blocks_that_cannot_be_of_the_usual_size_are_asked_for(tmp_path: Path, block: int, fits: str | None) -> None:
    path = written(tmp_path, hashed([1e3 * n for n in range(9)], block))
    if fits == "":
        assert read(path)[0][0].block_tokens == 512
        return
    hint = f"; blocks of {fits} would fit" if fits else ""
    with pytest.raises(TraceError, match=f"its hash_ids are not of blocks of 512 tokens{hint}: say --block-tokens N"):
        read(path)
    assert read(path, units=Units(block_tokens=block))[0][0].block_tokens == block


def test_units_of_a_format_that_says_them_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, SAMPLES["azure"])
    for units, option in ((Units(time_unit="s"), "--time-unit"), (Units(block_tokens=16), "--block-tokens")):
        with pytest.raises(UsageError, match=f"{option}: a trace in azure says it by itself"):
            read(path, units=units)


@pytest.mark.parametrize("estimated", [True, False])
def test_an_estimated_answer_is_no_longer_than_was_allowed(tmp_path: Path, estimated: bool) -> None:
    line = {"prompt_tokens": 5, "output_tokens": 753, "max_tokens": 120, "estimated": estimated}
    [record] = read(written(tmp_path, lines(line)))[0]
    assert record.output_tokens == (120 if estimated else 753)
