"""Published formats beyond Azure's, Mooncake's and ShareGPT's, read from made-up samples (tests/data/README.md)."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lab.replay.request import replay_request
from lab.trace import BrokenLine, TraceError, TraceRecord, detect_format, read_trace
from tests.support.paths import DATA

MADE_UP = DATA / "made_up"


def read(path: Path) -> tuple[list[TraceRecord], list[BrokenLine]]:
    broken: list[BrokenLine] = []
    return list(read_trace(path, report=broken.append)), broken


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("burstgpt_2.csv", "burstgpt"),
        ("bailian.jsonl", "bailian"),
        ("weka.json", "weka"),
        ("servegen/chunk-1-trace.csv", "servegen"),
        ("servegen/chunk-2-trace.csv", "servegen"),
    ],
)
def test_the_sample_is_recognised_and_whole(name: str, kind: str) -> None:
    assert detect_format(MADE_UP / name) == kind
    records, broken = read(MADE_UP / name)
    assert records
    assert broken == []
    assert len({record.id for record in records}) == len(records)


def test_version_2_of_burstgpt_has_sessions_and_times() -> None:
    records, _ = read(MADE_UP / "burstgpt_2.csv")
    assert [(one.session, one.e2e_s, one.error) for one in records] == [
        ("3b1c", 4.0, ""),
        ("77e0", 1.0, "failed"),
        ("3b1c", 6.0, ""),
        ("", 2.0, ""),
    ]


def test_bailian_conversations_and_prefixes() -> None:
    records, _ = read(MADE_UP / "bailian.jsonl")
    assert [(one.session, one.turns) for one in records] == [("10", 1), ("11", 1), ("10", 3), ("10", 5), ("14", 7)]
    assert [one.workload for one in records] == ["chat", "code", "chat", "chat", "search"]
    assert [one.arrived_at for one in records] == [0.0, 0.75, 9.5, 21.25, 30.0]
    assert {one.block_tokens for one in records} == {16}
    third = replay_request(records[3], 0.0, 1.0)
    assert len(third.prefix_blocks) == 7  # 120 tokens fill seven blocks of 16
    first, other, second = (list(records[number].prefix_blocks) for number in (0, 1, 2))
    assert list(third.prefix_blocks[:5]) == second[:5]
    assert first[:2] == second[:2]
    assert first[0] == other[0]
    assert len({*first, *other, *second}) == 9  # of twelve
    assert third.features.prefix_tokens[:2] == (16, 32)


def test_the_same_block_after_another_one_is_no_common_prefix(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    good = json.loads((MADE_UP / "bailian.jsonl").read_text().splitlines()[0])
    path.write_text("".join(json.dumps({**good, "hash_ids": ids}) + "\n" for ids in ([5, 6], [4, 6], [5, 6, 7])))
    one, other, longer = (list(record.prefix_blocks) for record in read(path)[0])
    assert not {*one} & {*other}
    assert longer[:2] == one
    assert all(0 <= number < 2**63 for number in longer)


def test_bailian_lines_that_are_wrong(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    good = json.loads((MADE_UP / "bailian.jsonl").read_text().splitlines()[0])
    wrong = [{**good, "input_length": -1}, {**good, "chat_id": "x"}, {**good, "hash_ids": ["a"]}, {**good, "turn": 1.5}]
    without = {key: value for key, value in good.items() if key != "timestamp"}
    path.write_text("".join(json.dumps(one) + "\n" for one in (good, *wrong, without)))
    records, broken = read(path)
    assert len(records) == 1
    assert [(one.number, one.why.split(":")[0]) for one in broken] == [
        (2, "prompt_tokens"),
        (3, "expected a number, not a text"),
        (4, "prefix_blocks"),
        (5, "expected a whole number, 0 or more, not 1.5"),
        (6, "has no 'timestamp'"),
    ]


def test_a_session_of_a_coding_agent() -> None:
    records, _ = read(MADE_UP / "weka.json")
    assert [(one.id, one.session, one.arrived_at, one.model, one.stream) for one in records] == [
        ("session-a/1", "session-a", 0.0, "made-up-large", True),
        ("session-a/2", "session-a", 5.0, "made-up-large", False),
        ("session-a/search/1", "session-a/search", 8.0, "made-up-small", True),
        ("session-a/search/2", "session-a/search", 9.5, "made-up-small", True),
        ("session-a/4", "session-a", 12.0, "made-up-large", True),
    ]
    first, second, *_, last = records
    assert (first.ttft_s, first.e2e_s, first.tools, first.workload, first.block_tokens) == (0.5, 2.0, True, "code", 64)
    assert second.arrived_at is not None
    assert first.ended_at is not None
    assert second.arrived_at - first.ended_at == second.think_time_s == 3.0
    assert [one.think_time_s for one in records] == [None, 3.0, None, 0.5, 5.5]
    assert list(last.prefix_blocks[:4]) == list(first.prefix_blocks)
    assert len(replay_request(last, 0.0, 1.0).prefix_blocks) == 512 // 16


def test_the_blocks_of_sessions_are_their_own_unless_they_are_global(tmp_path: Path) -> None:
    session = json.loads((MADE_UP / "weka.json").read_text())
    path = tmp_path / "sessions.jsonl"

    def blocks(scope: str) -> list[set[int]]:
        both = [{**session, "id": name, "hash_id_scope": scope} for name in ("a", "b")]
        path.write_text("".join(json.dumps(one) + "\n" for one in both))
        records, broken = read(path)
        assert broken == []
        of = {name: {n for one in records if one.id.startswith(name) for n in one.prefix_blocks} for name in "ab"}
        return [of["a"], of["b"]]

    own, others = blocks("local")
    assert len(own) == len(others) == 12
    assert not own & others
    assert max(own | others) < 2**61  # still a whole number of 64 bits when split into the engine's blocks
    assert blocks("global") == [set(range(1, 13))] * 2


def test_sub_agents_count_from_their_marker_or_from_the_beginning(tmp_path: Path) -> None:
    session = json.loads((MADE_UP / "weka.json").read_text())
    for request in session["requests"][2]["requests"]:
        request["t"] += 8.0
    path = tmp_path / "s.json"
    path.write_text(json.dumps(session))
    assert [one.arrived_at for one in read(path)[0]] == [0.0, 5.0, 8.0, 9.5, 12.0]


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
    path = tmp_path / "s.jsonl"
    path.write_text(f'{json.dumps(session)}\n{{"requests": 5}}\n{{"requ')
    records, broken = read(path)
    assert [one.id for one in records] == ["session-a/1", "session-a/search/2"]
    assert [str(one).removeprefix(f"{path}:") for one in broken[:4]] == [
        "1: request 2 of session-a: expected a number, not a text",
        "1: request 1 of session-a/search: has no 'out'",
        "1: request 4 of session-a: hash_ids: numbers within one session must be below 2^28",
        "1: request 5 of session-a: expected an object, not 17",
    ]
    assert "a sub-agent needs a list 'requests', and at most 8 others around it" in broken[4].why
    assert [one.number for one in broken[5:]] == [2, 3]


def test_a_client_model_is_drawn_with_its_rates_and_lengths() -> None:
    records, _ = read(MADE_UP / "servegen" / "chunk-1-trace.csv")
    assert records == read(MADE_UP / "servegen" / "chunk-1-trace.csv")[0]
    times = np.array([one.arrived_at for one in records], float)
    assert (np.diff(times) >= 0).all()
    by_window = Counter((times // 600).astype(int).tolist())
    assert set(by_window) == {0, 1, 3}  # the third window has no requests
    for window, expected in ((0, 300), (1, 600), (3, 150)):
        assert by_window[window] == pytest.approx(expected, rel=0.2)
    gaps = [np.diff(times[(times >= begin) & (times < begin + 600)]) for begin in (0, 600)]
    variation = [float(gap.std() / gap.mean()) for gap in gaps]
    assert variation == pytest.approx([1.0, 2.0], rel=0.25)  # 1 / sqrt(shape)
    early = [
        one for one, at in zip(records, times, strict=True) if at < 1200
    ]  # a window without lengths has the last ones
    assert Counter(one.prompt_tokens for one in early).keys() == {100, 300}
    shares = Counter(one.output_tokens for one in early)
    assert shares[40] / len(early) == pytest.approx(0.75, abs=0.06)
    assert {(one.prompt_tokens, one.output_tokens) for one in records[len(early) :]} == {(800, 10)}


def test_clients_of_a_folder_are_one_trace() -> None:
    records = list(read_trace(MADE_UP / "servegen", strict=True, in_order=True))
    assert {one.key for one in records} == {"chunk-1", "chunk-2"}
    times = [one.arrived_at for one in records]
    assert times == sorted(times, key=lambda at: at or 0.0)
    assert {one.prompt_tokens for one in records if one.key == "chunk-2"} == {50}  # without its images


def read_servegen_lines(path: Path) -> list[BrokenLine]:
    broken: list[BrokenLine] = []
    assert list(read_trace(path, format="servegen", report=broken.append)) == []
    return broken


def test_client_models_that_are_wrong(tmp_path: Path) -> None:
    for file in (MADE_UP / "servegen").iterdir():
        shutil.copy(file, tmp_path)
    trace, dataset = tmp_path / "chunk-1-trace.csv", tmp_path / "chunk-1-dataset.json"
    trace.write_text(
        "0,1e9,1,Gamma,1,1\n600,1,1,Gamma,1,1\n600,1,1,Gamma,1,1\n1200,x,1,Gamma,1,1\n1800,1,1,Weibull,0,1\n"
    )
    records, broken = read(trace)
    assert 500 < len(records) < 700
    assert [one.number for one in broken] == [3, 4, 5, 1]
    assert "6e+11 requests between two times; at most 1,000,000" in broken[-1].why
    trace.write_text("no model\n")
    assert [one.number for one in read_servegen_lines(trace)] == [1]
    for content, why in (
        ('{"0": {"input_tokens": "{}"}}', "no window has the frequencies"),
        ('{"0": {"input_tokens": "{5 0.5}", "output_tokens": "{5: 1}"}}', "no window has the frequencies"),
        ('{"0": {"input_tokens": "{5: 0.5, 6:}", "output_tokens": "{5: 1}"}}', "expected frequencies as"),
        ('{"0": {"input_tokens": "{5: -1}", "output_tokens": "{5: 1}"}}', "shares must be 0 or more"),
        ('{"0": {"input_tokens": "{5: nan}", "output_tokens": "{5: 1}"}}', "shares must be 0 or more"),
        ('{"0": {"input_tokens": "{inf: 1}", "output_tokens": "{5: 1}"}}', "lengths must be 0 to"),
        ('{"0": {"input_tokens": {"5": [1]}, "output_tokens": "{5: 1}"}}', "must be numbers"),
        (
            '{"nan": {"input_tokens": "{5: 1}", "output_tokens": "{5: 1}"}}',
            "expected a finite number|seconds or an ISO",
        ),
        ("[1]", "expected an object with an object for each window"),
        ("{", "unexpected end"),
    ):
        dataset.write_text(content)
        with pytest.raises(TraceError, match=why):
            list(read_trace(trace, format="servegen"))
    dataset.unlink()
    with pytest.raises(TraceError, match=r"with chunk-N-dataset\.json beside it"):
        list(read_trace(trace, format="servegen"))
    trace.rename(tmp_path / "other.csv")
    with pytest.raises(TraceError, match=r"other\.csv: a client model is a file chunk-N-trace\.csv"):
        list(read_trace(tmp_path / "other.csv", format="servegen"))
