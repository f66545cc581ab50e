"""Shadow drafting on the texts of finished requests."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from backends.speculation import Method
from gateway.relay.observers import EndedExchange
from gateway.rooms.shadow import __main__ as shadow_process
from gateway.rooms.shadow.replay import MOST_TEXT_BYTES, MOST_TEXTS, AnswerText, ShadowDrafting
from gateway.rooms.shadow.room import ShadowRoom
from gateway.routing.keys import Client
from gateway.routing.model import Model
from gateway.routing.routed_request import RoutedRequest
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.policy import Learned
from policies.learned.settings import LearnedSettings
from policies.learned.shadow_drafting import ShadowArm, ShadowSettings, replayed
from policies.policy import Decision, Outcome
from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.support.upstream import END, Wire, delta, usage
from tests.support.waiting import eventually

NGRAM = ShadowArm("ngram:3", Method.NGRAM, 3, {"prompt_lookup_min": 2, "prompt_lookup_max": 4})
SUFFIX = ShadowArm("suffix:24", Method.SUFFIX, 24)
TEXT = "the quick brown fox jumps over the lazy dog and then it sleeps. "


async def _repeats_a_sentence(wire: Wire) -> None:
    words = (TEXT * 4).split(" ")[:-1]
    await wire.stream(*(delta(word + " ") for word in words), usage(7, 52), END)


def _drafting(running: Running) -> dict[str, ShadowDrafting]:
    (room,) = [room for room in running.gateway.rooms if isinstance(room, ShadowRoom)]
    return room.drafting


def _observed(policy: Learned) -> dict[str, float]:
    """Return how many answers taught the tokens per step of each method; those that drafted nothing are under ''."""
    per_step = policy.known.per_step
    return {arm: per_step.count(arm, ()) for arm in per_step.groups[()].means}


async def _expected(running: Running) -> dict[str, float]:
    """Return the tokens per step that are expected of each backend."""
    notes = await running.notes(TEXT, stream=True)
    return {name: float(note.partition(" per step")[0].rpartition(" ")[2]) for name, note in notes.items()}


@pytest.mark.slow
async def test_answers_of_one_method_are_replayed_with_the_others() -> None:
    methods = {"a": "baseline", "b": "suffix", "c": "ngram"}
    async with start_gateway(methods, {"name": "learned", "seed": 1, "shadow_drafting": {"cpu": 1}}) as running:
        for upstream in running.upstreams.values():
            upstream.behaviour = _repeats_a_sentence
        to_a = {"x-gateway-backend": "a"}
        answers = [await running.chat(TEXT, stream=True, headers=to_a) for _ in range(3)]
        assert {answer.status_code for answer in answers} == {200}
        policy: Any = running.gateway.models[MODEL].policy
        await running.until(lambda: _observed(policy).get("suffix:24", 0.0) == 3.0)
        # Each request counts once for each method that drafts.
        assert _observed(policy) == {"": 3.0, "suffix:24": 3.0, "ngram:5": 3.0}
        # The text is repetitive, so suffix drafting accepts more than in the calibration.
        expected = await _expected(running)
        assert expected["b"] > expected["c"] > 1.5
        assert expected["a"] == 1.0
        shadow = _drafting(running)[MODEL]
    assert shadow._process is None


@pytest.mark.parametrize(
    ("methods", "policy"),
    [
        ({"a": "baseline", "b": "suffix"}, {"name": "least_loaded"}),
        ({"a": "baseline", "b": "baseline"}, {"name": "learned"}),
        ({"a": "baseline", "b": "suffix"}, {"name": "learned", "shadow_drafting": {"sample": 0}}),
    ],
)
async def test_nothing_is_replayed_if_the_policy_does_not_use_it(
    methods: dict[str, str], policy: dict[str, Any]
) -> None:
    async with start_gateway(methods, policy) as running:
        assert _drafting(running) == {}
        assert (await running.chat()).status_code == 200


def _outcome(endpoint: Endpoint = Endpoint.CHAT) -> Outcome:
    features = RequestFeatures("m", endpoint, temperature=0.0)
    return Outcome(features, Decision("a", "p", "r"), Method.BASELINE, 200, 0.1, 0.01, 1.0, 10, 52, None)


class _Recording(Learned):
    def __init__(self) -> None:
        super().__init__(LearnedSettings())
        self.outcomes: list[Outcome] = []

    def observe_shadow(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


BODY = orjson.dumps({"messages": [{"role": "user", "content": TEXT}]})
ANSWER = orjson.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": TEXT * 4}}]})


def _begin(shadow: ShadowDrafting, body: bytes, endpoint: Endpoint = Endpoint.CHAT) -> AnswerText | None:
    model = Model("m", _Recording(), 1.0, {})
    return shadow.follow(RoutedRequest(model, _outcome(endpoint).request), body)


def _end(text: AnswerText | None) -> None:
    """Observe the end of a request that succeeded."""
    ended = EndedExchange(b"", Client(""), 0.0)
    ended.status, ended.label, ended.outcome = 200, "ok", _outcome()
    text.on_end(ended)


def _add(shadow: ShadowDrafting, answer: bytes = ANSWER) -> None:
    text = _begin(shadow, BODY)
    text.on_answer(answer, None)
    _end(text)


def test_texts_that_find_the_queue_full_are_dropped() -> None:
    policy = _Recording()
    shadow = ShadowDrafting(policy, ShadowSettings(), [NGRAM])  # not started, so the queue is not emptied
    early = _begin(shadow, b"{}")
    for _ in range(MOST_TEXTS):
        _add(shadow)
    assert _begin(shadow, b"{}") is None, "no answer is collected while the queue is full"
    early.on_answer(b"{}", None)
    _end(early)
    assert len(shadow._queue) == MOST_TEXTS
    large, answer = ShadowDrafting(policy, ShadowSettings(), [NGRAM]), ANSWER.ljust(MOST_TEXT_BYTES - 300)
    for _ in range(70):
        _add(large, answer)
    assert len(large._queue) < 70


def test_long_texts_and_other_endpoints_are_not_replayed() -> None:
    shadow = ShadowDrafting(_Recording(), ShadowSettings(), [NGRAM])
    assert _begin(shadow, b"x" * (MOST_TEXT_BYTES + 1)) is None
    assert _begin(shadow, b"{}", Endpoint.EMBEDDINGS) is None
    text = _begin(shadow, b"{}")
    text.on_chunk(b"x" * (MOST_TEXT_BYTES // 2), 1.0)
    text.on_chunk(b"x" * (MOST_TEXT_BYTES // 2 + 1), 2.0)
    _end(text)
    assert not shadow._queue


@pytest.mark.slow
async def test_replaying_continues_after_invalid_texts_and_a_killed_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder from which the process must import nothing."""
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "__init__.py").write_text("raise SystemExit('wrong package')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gateway.rooms.shadow.replay._RESTART_DELAY_S", 0.0)
    policy = _Recording()
    shadow = ShadowDrafting(policy, ShadowSettings(cpu=1.0), [NGRAM, SUFFIX])
    shadow.start()
    try:
        _add(shadow, b'{"choices": 7}')
        _add(shadow, b"\xff\x00 not JSON")
        _add(shadow)
        await eventually(lambda: len(shadow._results) == 1)
        process = shadow._process
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        _add(shadow)  # fails, because the process is dead
        await eventually(lambda: shadow._process is None)
        _add(shadow)  # starts a new process
        await eventually(lambda: len(shadow._results) == 2)
        shadow.deliver(policy.observe_shadow)
        assert [set(outcome.shadow) for outcome in policy.outcomes] == [{"ngram:3", "suffix:24"}] * 2
        assert policy.outcomes[0].shadow == policy.outcomes[1].shadow
    finally:
        shadow.stop()
    assert shadow._process is None


def test_a_text_that_cannot_be_replayed_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: Iterator[Any] = iter([RecursionError(), MemoryError(), {"ngram:3": 2.0}])

    def replay(*_: object) -> dict[str, float]:
        if isinstance(found := next(replays), Exception):
            raise found
        return found

    monkeypatch.setattr(shadow_process, "replayed_text", replay)
    sink = io.BytesIO()
    shadow_process.main(io.BytesIO(b"[]\n" + b'{"body":0,"answer":0}\n' * 3), sink)
    assert ["error" in orjson.loads(line) for line in sink.getvalue().splitlines()] == [True, True, False]


def test_token_ids_are_used_if_the_engine_sends_them() -> None:
    prompt, output = list(range(100, 140)), [*range(100, 130), *range(100, 130)]
    answer = orjson.dumps(
        {"prompt_token_ids": prompt, "choices": [{"index": 0, "text": "not the ids", "token_ids": output}]}
    )
    body = orjson.dumps({"prompt": "not the ids either"})
    head = {"endpoint": "completions", "streamed": False, "body": len(body), "answer": len(answer)}
    arms = [{"arm": "ngram:3", "method": "ngram", "k": 3, "config": dict(NGRAM.config)}]
    sink = io.BytesIO()
    shadow_process.main(io.BytesIO(orjson.dumps(arms) + b"\n" + orjson.dumps(head) + b"\n" + body + answer), sink)
    assert orjson.loads(sink.getvalue())["tokens_per_step"] == replayed(prompt, output, [NGRAM])
