"""The recorder: what it writes, and that requests do not wait for it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from backends.backend import Backend, EngineLoad
from backends.http.address import Address
from backends.http.client import UpstreamClient
from backends.speculation import Method
from gateway.config.pool_file import PoolFile
from gateway.relay.observers import EndedExchange
from gateway.reload.differences import needs_restart
from gateway.rooms.recorder.document import RecordBuilder, RequestNotes
from gateway.rooms.recorder.files import TraceFiles
from gateway.rooms.recorder.hashes import TextHasher
from gateway.rooms.recorder.recorder import Recorder, recorder_issue
from gateway.rooms.recorder.room import RecorderRoom
from gateway.rooms.recorder.settings import RecorderSettings
from gateway.routing.keys import Client
from gateway.routing.model import Model, Upstream
from gateway.routing.routed_request import RoutedRequest
from gateway.routing.series import RequestSeries
from gateway.service.assembly import assemble
from gateway.telemetry.registry import Registry
from lab.trace.lines import open_unpacked
from lab.trace.read import read_trace
from lab.trace.record import TraceRecord
from policies.features.prompt import Prompt
from policies.features.request import Endpoint, RequestFeatures
from policies.policy import Decision, Outcome, policies
from tests.gateway.conftest import MODEL, start_gateway
from tests.support.command import until
from tests.support.registered_metrics import value_of


def records(folder: Path) -> list[TraceRecord]:
    return list(read_trace(folder, strict=True))


def recorded(recorder: Recorder) -> list[TraceRecord]:
    """End a recorder, and return what it has written."""
    recorder.stop()
    return records(recorder._settings.path)


def settings(folder: Path, **fields: Any) -> RecorderSettings:
    return RecorderSettings.model_validate({"path": folder, **fields})


def routed_chat(prompt: Prompt | None = None) -> RoutedRequest:
    kind = policies()["thresholds"]
    features = RequestFeatures("m", Endpoint.CHAT, stream=True, temperature=0.5, prompt_tokens=9, template="0badcafe")
    return RoutedRequest(Model("m", kind(kind.Settings()), 1.0, {}), features, prompt=prompt)


def finished(
    recorder: Recorder, number: int = 0, body: bytes = b"", joined: Sequence[Backend] = (), **changes: Any
) -> tuple[RequestNotes, EndedExchange]:
    """Return a request that was answered by one of two replicas, or of these and some more, as the recorder gets it."""
    backends = [Backend("b", "m", Method.NGRAM, ""), Backend("a", "m", Method.BASELINE, ""), *joined]
    scores: dict[str, Any] = {"predicted_s": [1.25, None], "propensities": [0.75, 0.25]}
    decision = Decision("b", "thresholds", "rule", 0.75, candidates=backends, **scores)
    backends[0].in_flight, backends[0].load = 3, EngineLoad(running=5, waiting=2, at_s=1.0)
    routed = routed_chat()
    notes = recorder.follow(routed, b"")
    assert notes is not None
    notes.body = body
    notes.on_send(decision, backends)
    notes.chunks.extend((10.0, 10.25, 10.75))
    outcome = Outcome(
        routed.features, decision, Method.NGRAM, 200, 1.0, 0.25, 2.0, 9, 4, 2.0, 6, 2, shadow={"suffix:24": 1.5}
    )
    series = RequestSeries(Registry()).of(backends[0])
    upstream = Upstream(backends[0], UpstreamClient(Address.parse("http://127.0.0.1:1")), series)
    given = {"routed": routed, "decision": decision, "upstream": upstream, "status": 200, "label": "ok"}
    given |= {"first_s": 10.0, "last_s": 10.75, "ended_s": 11.0, "outcome": outcome}
    ended = EndedExchange(b"%d" % number, Client("team"), 9.0)
    for name, value in {**given, **changes}.items():
        setattr(ended, name, value)
    return notes, ended


Started = Callable[..., Recorder]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """Return a function that starts recorders, which stop after the test."""
    running: list[Recorder] = []

    def start(**fields: Any) -> Recorder:
        recorder = Recorder(settings(tmp_path, **fields))
        recorder.start()
        running.append(recorder)
        return recorder

    yield start
    for recorder in running:
        recorder.stop()


def test_a_record_has_all_fields_of_a_request(started: Started) -> None:
    recorder = started()
    recorder.add(*finished(recorder, 7))
    (record,) = recorded(recorder)
    assert (record.id, record.model, record.key, record.template) == ("7", "m", "team", "0badcafe")
    assert (record.policy, record.reason, record.backend, record.method) == ("thresholds", "rule", "b", "ngram")
    assert record.propensity == 0.75
    assert record.candidates == {
        "backend": ["b", "a"], "prediction_s": [1.25, None], "propensity": [0.75, 0.25], "in_flight": [3, 0],
        "running": [5, None], "waiting": [2, None],
    }  # fmt: skip
    assert (record.ttft_s, record.itl, record.e2e_s) == (1.0, [0.25, 0.5], 2.0)
    assert (record.spec.drafted_tokens, record.spec.accepted_tokens, record.spec.tokens_per_step) == (6, 2, 2.0)
    assert record.acceptance == {"ngram": 2.0, "suffix": 1.5}
    assert (record.prompt_tokens, record.output_tokens, record.error) == (9, 4, "")


def test_a_failure_is_recorded_with_its_kind(started: Started) -> None:
    recorder = started()
    for status, label in ((400, "client_error"), (502, "interrupted"), (502, "unanswered")):
        recorder.add(*finished(recorder, status=status, label=label, outcome=None, retried_from="a"))
    found = [(each.status, each.error, each.retried_from, each.output_tokens) for each in recorded(recorder)]
    assert found == [(400, "client_error", "a", 0), (502, "interrupted", "a", 0), (502, "unanswered", "a", 0)]


@pytest.mark.parametrize(
    ("propensity", "joined", "expected"),
    [(1.0, [], [1.0, 0.0]), (0.75, [], [0.75, 0.25]), (0.5, [Backend("c", "m", Method.SUFFIX, "")], [0.5, None, None])],
)
def test_propensities_of_other_candidates_are_implied_where_possible(
    propensity: float, joined: list[Backend], expected: list[float | None], started: Started
) -> None:
    recorder = started()
    decision = Decision("b", "round_robin", "next_in_turn", propensity)
    recorder.add(*finished(recorder, joined=joined, decision=decision))
    (record,) = recorded(recorder)
    assert record.candidates["propensity"] == expected


@pytest.mark.parametrize(
    ("arm", "other"), [({}, 0.0), ({"arm": "head", "arm_chance": 1.0}, 0.0), ({"arm": "head", "arm_chance": 0.5}, None)]
)
def test_candidates_that_the_policy_excluded_have_propensity_0_where_no_other_arm_would_have_chosen(
    arm: dict[str, Any], other: float | None, started: Started
) -> None:
    recorder = started()
    notes, ended = finished(recorder)
    given: dict[str, Any] = {"predicted_s": [2.5], "propensities": [0.5], **arm}
    ended.decision = Decision("b", "learned", "least_delay", 0.5, candidates=notes.candidates[:1], **given)
    recorder.add(notes, ended)
    (record,) = recorded(recorder)
    assert (record.arm, record.propensity) == (arm.get("arm", ""), 0.5)
    assert (record.candidates["prediction_s"], record.candidates["propensity"]) == ([2.5, None], [0.5, other])


def test_changes_between_requests_are_recorded(started: Started) -> None:
    recorder = started()
    decision = Decision("b", "random", "drawn", 0.5)
    _, (second, _), (third, _) = requests = [finished(recorder, decision=decision) for _ in range(3)]
    second.candidates[0].load = EngineLoad(running=6, waiting=0, at_s=2.0)
    second.on_send(decision, second.candidates)
    third.on_send(decision, third.candidates[:1])
    for notes, ended in (*requests, finished(recorder, decision=decision)):
        recorder.add(notes, ended)
    columns = [[record.candidates[name] for name in ("backend", "running", "waiting")] for record in recorded(recorder)]
    candidates = [list(zip(*each, strict=True)) for each in columns]
    usual = [("b", 5, 2), ("a", None, None)]
    assert candidates == [usual, [("b", 6, 0), ("a", None, None)], [("b", 5, 2)], usual]


def test_records_beyond_the_queue_are_dropped_and_counted(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path, queue=3))
    for number in range(5):
        recorder.add(*finished(recorder, number))
    assert recorder.dropped == 2
    recorder.start()
    assert [record.id for record in recorded(recorder)] == ["0", "1", "2"]
    registry = Registry()
    for _ in range(2):
        recorder.count(registry)
    for result, number in (("written", 3), ("dropped", 2), ("failed", 0)):
        assert value_of(registry, "gateway_recorder_records_total", result=result) == number


def test_queued_texts_are_limited(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path, text="full", queue_mib=1, max_text_kib=600))
    for number in range(4):
        recorder.add(*finished(recorder, number, body=b"x" * 600_000))
    assert recorder.dropped == 2


def test_of_a_long_stream_the_first_times_are_kept_and_count(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path, queue_mib=0.1))
    for number in range(4):
        notes, ended = finished(recorder, number)
        for _ in range(10_000):
            notes.on_chunk(b"", 11.0)
        recorder.add(notes, ended)
    assert recorder.dropped == 2
    recorder.start()
    assert [len(record.itl or ()) for record in recorded(recorder)] == [8192, 8192]


def test_a_sample_of_the_requests_is_recorded(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path, sample=0.25))
    routed = routed_chat()
    assert 800 < sum(recorder.follow(routed, b"") is not None for _ in range(4000)) < 1200


def test_a_record_that_cannot_be_built_does_not_affect_others(started: Started) -> None:
    recorder = started()
    notes, ended = finished(recorder, 1)
    scores: dict[str, Any] = {"predicted_s": [1.0], "propensities": []}  # inconsistent, by a defect of the policy
    ended.decision = Decision("b", "learned", "least_delay", 1.0, candidates=notes.candidates[:1], **scores)
    recorder.add(notes, ended)
    recorder.add(*finished(recorder, 2))
    assert [record.id for record in recorded(recorder)] == ["2"]
    assert (recorder.written, recorder.failed) == (1, 1)


@pytest.mark.slow
def test_write_errors_are_counted_and_writing_is_retried(
    tmp_path: Path, started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "traces"
    path.write_text("no folder")
    recorder = started(path=path, flush_s=0.01)
    recorder.add(*finished(recorder, 1))
    until(lambda: recorder.failed == 1)
    recorder.add(*finished(recorder, 2))
    until(lambda: recorder.failed == 2)
    assert caplog.text.count(f"records are lost: {path}: File exists") == 1
    path.unlink()
    recorder.add(*finished(recorder, 3))
    assert [record.id for record in recorded(recorder)] == ["3"]


def test_a_disk_that_fills_during_a_write_leaves_only_complete_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TraceFiles(settings(tmp_path))
    files.write(b'{"prompt_tokens": 1}\n')
    write = os.write

    def full(descriptor: int, data: memoryview) -> int:
        if len(data) > 10:
            return write(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for _ in range(3):  # the others would begin a file each
        with pytest.raises(OSError, match="No space left"):
            files.write(b'{"prompt_tokens": 2}\n' * 50)
    monkeypatch.undo()
    files.write(b'{"prompt_tokens": 3}\n')
    files.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert [record.prompt_tokens for record in records(tmp_path)] == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["removed", "renamed", "folder removed"])
def test_a_file_that_is_no_longer_in_place_is_begun_anew(
    how: str, tmp_path: Path, started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "traces"
    recorder = started(path=folder, flush_s=0.01, compression="none")
    recorder.add(*finished(recorder, 1))
    until(lambda: recorder.written == 1)
    (file,) = folder.iterdir()
    if how == "renamed":
        file.rename(folder / "requests-rotated.jsonl")
    else:
        file.unlink()
        if how == "folder removed":
            folder.rmdir()
    for number in (2, 3):
        recorder.add(*finished(recorder, number))
        until(lambda: recorder.written + recorder.failed >= number)  # noqa: B023 -- called before the next round
    recorder.stop()
    assert (recorder.written, recorder.failed) == (3, 0)
    assert {record.id for record in records(folder)} == {"2", "3"} | ({"1"} if how == "renamed" else set())
    assert caplog.text.count(f"{file} was removed or renamed while it was written") == 1


def test_records_of_a_file_that_is_removed_during_a_write_are_lost(
    tmp_path: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = started(path=tmp_path, flush_s=0.01, compression="none")
    write = os.write

    def removed(descriptor: int, data: memoryview) -> int:
        for path in tmp_path.glob("requests-*"):
            path.unlink()
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", removed)
        recorder.add(*finished(recorder, 1))
        until(lambda: recorder.written + recorder.failed == 1)
    recorder.add(*finished(recorder, 2))
    recorder.stop()
    assert (recorder.written, recorder.failed) == (1, 1)
    assert [record.id for record in records(tmp_path)] == ["2"]


def test_files_are_rotated_by_size_and_age(tmp_path: Path) -> None:
    clock = [1000.0]
    files = TraceFiles(settings(tmp_path, compression="none", rotate_mib=0.001, rotate_s=60), lambda: clock[0])
    line = b'{"prompt_tokens": 1, "id": "%s"}\n' % (b"x" * 400)
    for _ in range(6):  # three to a KiB
        clock[0] += 1
        files.write(line)
    assert sorted(path.stat().st_size for path in tmp_path.iterdir()) == [len(line) * 3] * 2
    clock[0] += 1
    files.write(line)
    files.maintenance()
    clock[0] += 60
    files.maintenance()
    files.write(line)
    files.close()
    assert len(list(tmp_path.iterdir())) == 4
    assert len(records(tmp_path)) == 8
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


def test_old_files_are_removed_unless_they_are_being_written(tmp_path: Path) -> None:
    line = b'{"prompt_tokens": 1}\n' * 100
    clock = [1e9]
    other = TraceFiles(settings(tmp_path, compression="none"), lambda: clock[0])
    other.write(line)
    clock[0] += 1
    files = TraceFiles(settings(tmp_path, compression="none", rotate_mib=0.001, keep_mib=0.005), lambda: clock[0])
    (tmp_path / "mine.jsonl").write_bytes(line)
    for index in range(5):
        clock[0] += 1
        files.write(line)
        newest = max(tmp_path.glob("requests-*"))
        os.utime(newest, (1e9 + index, 1e9 + index))
    files.write(line)
    files.close()
    kept = sorted(tmp_path.glob("requests-*"))
    assert [path.name[9:24] for path in kept] == ["20010909T014640", "20010909T014646", "20010909T014646"]
    assert (tmp_path / "mine.jsonl").exists()
    other.close()
    late = TraceFiles(settings(tmp_path, keep_s=1e-3), lambda: 4e9)
    late.write(line)
    late.close()
    assert [path.name[9:13] for path in tmp_path.glob("requests-*")] == ["2096"]


def test_old_files_are_removed_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    clock = iter(range(10**9, 10**9 + 99))
    files = TraceFiles(settings(tmp_path, compression="none", rotate_mib=0.001, keep_mib=1e-9), lambda: next(clock))
    for _ in range(3):
        files.write(b'{"prompt_tokens": 1}\n' * 100)
        assert len(list(tmp_path.iterdir())) == 1, "but for the one that is written"
    files.close()


def test_files_age_while_nothing_is_written_and_whatever_the_clock_does(tmp_path: Path) -> None:
    line, clock = b'{"prompt_tokens": 1}\n', [time.time()]
    files = TraceFiles(settings(tmp_path, rotate_s=60, keep_s=3600), lambda: clock[0])
    for _ in range(2):
        files.write(line)
        clock[0] -= 86_400
        files.maintenance()
    assert len(list(tmp_path.iterdir())) == 2
    clock[0] += 3 * 86_400
    files.maintenance()
    assert not list(tmp_path.iterdir())


def test_it_joins_where_it_is_asked_for_with_a_salt_that_is_drawn_once(tmp_path: Path) -> None:
    off = PoolFile.model_validate({"models": {MODEL: {"backends": {"b": {"url": "http://b", "method": "suffix"}}}}})
    on = off.model_copy(update={"recorder": settings(tmp_path, text="hashes")})
    assert RecorderRoom.drawn(off) == {}
    drawn, again = (cast("Any", on).model_copy(update=RecorderRoom.drawn(on)) for _ in range(2))
    assert drawn.recorder.hash_salt is not None
    assert drawn.recorder != again.recorder
    assert RecorderRoom.drawn(drawn)["recorder"] is drawn.recorder
    joined = [[type(room) for room in assemble(pool, [], b"").rooms] for pool in (off, drawn)]
    assert [RecorderRoom in kinds for kinds in joined] == [False, True]
    assert needs_restart(off, on, [RecorderRoom]) == ["recorder: not set -> set"]


def test_a_folder_that_cannot_be_written_is_an_issue(tmp_path: Path) -> None:
    assert recorder_issue(settings(tmp_path / "a" / "b")) == ""
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "file"
    file.write_text("")
    assert "cannot write to" in recorder_issue(settings(file))
    assert "cannot write to" in recorder_issue(settings(file / "below"))
    assert "cannot write to /proc" in recorder_issue(settings(Path("/proc/traces")))
    assert recorder_issue(settings(tmp_path, text="hashes", tokenizer=tmp_path)).startswith("recorder.tokenizer")


def test_records_built_on_the_event_loop_equal_those_of_the_thread(tmp_path: Path) -> None:
    recorder = Recorder(settings(tmp_path, text="hashes"))
    at_once = RecordBuilder("hashes", TextHasher(b"salt"), TextHasher(b"salt"))
    later = RecordBuilder("hashes", TextHasher(b"salt"))
    for prompt, is_short in (("two words", True), ("ä word\n" * 700, False)):
        notes, ended = finished(recorder, routed=routed_chat(Prompt([prompt, "and more"])))
        del notes.chunks[:]
        answered = RequestNotes(lambda *_: None, keeps_answer=True, max_bytes=1024)
        answered.on_answer(b" " * 50, {"choices": [{"message": {"content": "two words, 12345"}}]})
        answered.on_end(ended)
        notes.transcript = answered.transcript
        begun = at_once.begin(notes, ended, 1.0)
        assert (begun is not None) is is_short
        line = begun or at_once.end(notes)
        assert later.begin(notes, ended, 1.0) is None
        assert later.end(notes) == line
        assert json.loads(notes.head + b"\n").items() <= json.loads(line).items()
        assert {"prompt_hashes", "output_hashes", "hashing"} <= json.loads(line).keys()


# In a gateway


async def test_requests_through_a_gateway_are_recorded_without_secrets(tmp_path: Path) -> None:
    keys = [{"name": "team", "key": "sk-secret-key"}]
    async with start_gateway(recorder={"path": str(tmp_path / "t")}, keys=keys) as running:
        headers = {"authorization": "Bearer sk-secret-key", "x-gateway-workload": "code", "x-request-id": "my-id"}
        await running.chat("def f():\n    return 1\n" * 5, headers=headers, temperature=0.25, max_tokens=9)
        await running.chat("again", headers=headers | {"x-request-id": "two"}, stream=True)
        (await running.client.get("/v1/models", headers=headers)).raise_for_status()
        await running.client.post("/tokenize", json={"model": MODEL, "prompt": "x"}, headers=headers)
    plain, streamed, other = records(tmp_path / "t")
    assert (other.endpoint, other.prompt_tokens) == ("other", 7)  # as the engine reports
    assert (plain.id, plain.model, plain.endpoint) == ("my-id", MODEL, "chat")
    assert (plain.key, plain.workload) == ("team", "code")
    assert (plain.temperature, plain.max_tokens, plain.stream, plain.output_tokens) == (0.25, 9, None, 3)
    assert plain.policy == "round_robin"
    assert {*plain.candidates["backend"]} == {"a", "b"}
    assert plain.template  # although this policy does not use it
    assert plain.code_share == 1.0
    assert plain.arrived_at is not None
    assert 0.0 < plain.arrived_at < (streamed.arrived_at or 0.0) < plain.arrived_at + 60
    assert (streamed.id, streamed.stream, plain.ttft_s) == ("two", True, None)
    written = b""
    for path in (tmp_path / "t").iterdir():
        with open_unpacked(path) as file:
            written += file.read()
    assert written.count(b"\n") == 3
    for secret in (b"sk-secret-key", b"def f()", b"again", b"from a", b"from b"):
        assert secret not in written


async def test_hashes_are_recorded_instead_of_texts(tmp_path: Path) -> None:
    recorder = {"path": str(tmp_path), "text": "hashes", "hash_salt": "s", "max_text_kib": 20}
    policy = {"name": "thresholds", "rules": [{"name": "all", "when": {}, "prefer": ["baseline"]}]}
    # The second is parsed again, the third is not recorded.
    prompts = ["from a distance", "a long way, " * 1500, "too far, " * 3000]
    async with start_gateway({"a": "baseline"}, recorder=recorder, policy=policy) as running:
        for prompt in prompts:
            await running.chat(prompt)
            await running.chat(prompt, stream=True)
    recorded = records(tmp_path)
    assert {(record.messages, record.output) for record in recorded} == {((), "")}
    hasher = TextHasher(b"s")
    expected: list[Any] = [hasher.hash_text(prompt, output) for prompt in prompts for output in ("from a", "from a!")]
    expected[4:] = [((), *hashes[1:]) for hashes in expected[4:]]
    assert [(record.prompt_hashes, record.output_hashes, record.hashing) for record in recorded] == expected
    assert recorded[0].prompt_hashes[:2] == recorded[0].output_hashes[:2]


@pytest.mark.slow
async def test_texts_are_recorded_up_to_the_limit(tmp_path: Path) -> None:
    recorder = {"path": str(tmp_path), "text": "full", "max_text_kib": 4}
    async with start_gateway({"a": "baseline"}, recorder=recorder) as running:
        await running.chat("what is recorded?")
        await running.chat("and streamed?", stream=True)
        await running.chat("long " * 2000)
        await running.chat("two", n=2)
    plain, streamed, long, two = records(tmp_path)
    assert (plain.messages, plain.output) == ([{"role": "user", "content": "what is recorded?"}], "from a")
    assert (streamed.messages[0]["content"], streamed.output) == ("and streamed?", "from a!")
    assert (long.messages, long.prompt_tokens) == ((), 7)
    assert (two.messages, two.output) == ((), "")
