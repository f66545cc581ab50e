"""The request table: requests survive unchanged and in order, also in other processes, and files are removed."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gateway.rooms.recorder.schema import Hashing
from lab.simulation.request import ReplayRequest, replay_request
from lab.simulation.table import RequestTable, request_table
from lab.trace.read import in_arrival_order, read_trace
from lab.trace.record import TraceRecord
from tests.support.paths import DATA

UNLIKE = [
    TraceRecord(arrived_at=3.0, model="a", prompt_tokens=0, output_tokens=None, baseline_only=("min_p", "logit_bias")),
    TraceRecord(arrived_at=1.0, model="b", n=3, temperature=0.2, top_p=0.5, max_tokens=7, prompt_tokens=2**40),
    TraceRecord(model="b", messages=[{"role": "user", "content": "def f(x):\n    return x\n" * 30}], turns=4),
    TraceRecord(arrived_at=1.0, prompt_token_ids=[5, 6, 5, 6], output_token_ids=[6, 5, 6], max_tokens=0),
    TraceRecord(arrived_at=2.0, prompt_hashes=[2**51, 3], output_hashes=[3], hashing=Hashing("piece", 3, "salt")),
    TraceRecord(arrived_at=2.0, acceptance={"eagle3": [1, 3, 2], "ngram": 1.7}, output_tokens=9, stream=True),
    TraceRecord(prefix_blocks=(3, 2**60), prompt_tokens=900, workload="code", template="0badcafe", overlap=0.25),
    TraceRecord(arrived_at=-4.5, structured=True, tools=True, code_share=0.125, endpoint="messages"),
]


def expected(records: list[TraceRecord]) -> list[ReplayRequest]:
    """Return the requests without the table."""
    return [replay_request(record, 0.0, 0.7) for record in in_arrival_order(records)]


@pytest.mark.parametrize(
    "records",
    [
        UNLIKE,
        list(read_trace(DATA / "AzureLLMInferenceTrace_code.csv")),
        list(read_trace(DATA / "mooncake_synthetic_trace.jsonl"))[::-1],
        [],
    ],
    ids=["unlike", "azure", "mooncake", "none"],
)
def test_requests_are_unchanged_and_in_order(records: list[TraceRecord]) -> None:
    requests = expected(records)
    with request_table(records, 0.7) as table:
        assert list(table) == requests
        assert [table[index] for index in range(len(table))] == requests
        assert list(table[2:5]) == requests[2:5]
        unpickled = pickle.loads(pickle.dumps(table[1:]))
        assert list(unpickled) == requests[1:]


def test_the_file_is_removed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with request_table(UNLIKE, 0.7) as table:
        assert len(list(tmp_path.iterdir())) == 1
        assert len(list(table)) == len(UNLIKE)
    assert not list(tmp_path.iterdir())


def test_arrival_times_can_be_replaced() -> None:
    with request_table(UNLIKE, 0.7) as table:
        assert np.isnan(table.arrived_at[:2]).all()
        assert table.arrived_at[2:].tolist() == [-4.5, 1.0, 1.0, 2.0, 2.0, 3.0]
        paced = table.paced(np.arange(8.0))[3:]
        assert isinstance(paced, RequestTable)
        assert [one.arrived_s for one in paced] == [3.0, 4.0, 5.0, 6.0, 7.0]
        assert paced[0].arrived_s == 3.0


def test_requests_that_are_not_inference_are_left_out() -> None:
    records = [TraceRecord(endpoint=endpoint, prompt_tokens=9) for endpoint in ("chat", "other", "embeddings")]
    with request_table(records, 0.7) as table:
        assert [request.features.endpoint for request in table] == ["chat"]
        assert table.assumed[0] == "2 requests of the trace generate no text and are left out."


def test_a_trace_without_an_answer_is_refused() -> None:
    failed = TraceRecord(prompt_tokens=9, output_tokens=0, status=502, error="refused")
    with pytest.raises(ValueError, match="every request of the trace failed"), request_table([failed, failed], 0.7):
        pass
    with request_table([failed, replace(failed, status=None, error="cancelled")], 0.7) as table:
        assert len(table) == 2


def test_what_the_trace_does_not_say_is_said() -> None:
    known = TraceRecord(prompt_tokens=9, workload="code", temperature=0.0, output_tokens=1, acceptance={"a": 2.0})
    known = replace(known, output_token_ids=[1])
    with request_table([known, TraceRecord(prompt_tokens=9, output_tokens=5, temperature=0.0)], 0.7) as table:
        first, second = table.assumed
    assert first.startswith("Of 2 requests 1 say which drafts were accepted (a 1), and 1 have tokens, on which n-gram ")
    assert second == "Other drafts are accepted as by the calibration, as in chat where no kind of text is named (1)."
    unlike = [replace(known, error="failed"), replace(known, n=2), replace(known, cached_tokens=16)]
    unlike += [replace(known, prompt_tokens=0), replace(known, output_tokens=0)]
    with request_table([known, *unlike], 0.7) as table:
        assert table.assumed == [
            "1 had failed, and are played with what they got of an answer, at least a token.",
            "1 ask for several answers, which are played as one as long as all of them.",
            "1 had tokens in a prefix cache, but no prefix_blocks: here none of theirs is cached.",
            "2 have no tokens in prompt or answer, and are played with one.",
        ]
    with request_table([known, known], 0.7) as table:
        assert table.assumed == []
    of_a_baseline = TraceRecord(prompt_tokens=9, output_tokens=5, acceptance={"baseline": 1.0})
    with request_table([of_a_baseline, replace(known, output_token_ids=())], 0.7) as table:
        assert table.assumed[0].startswith("Of 2 requests 1 say which drafts were accepted (a 1), and 0 have tokens")
    with request_table([replace(known, output_token_ids=())], 0.7) as table:
        assert table.assumed, "n-gram and suffix drafting have nothing to run on"
    with request_table([TraceRecord(prompt_tokens=9)], 0.7) as table:
        assert table.assumed[0] == "1 answers of unknown length have 220 tokens, or max_tokens if fewer."
        assert table.assumed[2].endswith("(1), at temperature 0.7 where none is recorded (1).")


def test_copies_of_sessions_share_no_prefix_and_begin_at_random() -> None:
    with request_table(read_trace([DATA / "made_up" / "weka.json"]), 1.0) as table:
        assert not table.order.is_open
        copied = table.in_sessions(rate=1.0, speed=1.0, copies=3, seed=1)
        assert len(copied) == 3 * len(table)
        again = table.in_sessions(rate=None, speed=1.0, copies=1, seed=1)
        assert [one.prefix_blocks for one in again] == [one.prefix_blocks for one in table]
        assert again.order.arrived_s.tolist() == table.arrived_at.tolist()
        by_copy: dict[str, set[int]] = {}
        begins_s: dict[str, float] = {}
        for one in copied:
            copy = one.session.partition("#")[2]
            by_copy.setdefault(copy, set()).update(one.prefix_blocks)
            begins_s.setdefault(one.session, one.arrived_s)
            assert [block >> 2 for block in one.prefix_blocks[::4]] == list(one.features.prefix) or copy
    assert len(set().union(*by_copy.values())) == sum(map(len, by_copy.values()))
    assert len({round(at_s, 6) for at_s in begins_s.values()}) == 6
    assert (np.diff([one.arrived_s for one in copied]) >= 0).all()
