"""What lookups would have given is found out beside the requests, on the text of whatever answered."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from backends.speculation import Method
from gateway.shadow import ShadowDrafting
from gateway.telemetry.fallback import Fallback
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.models.acceptance import ACCEPTANCE, ARM, BACKEND
from policies.learned.policy import Learned
from policies.learned.shadow_drafting import ShadowArm, ShadowSettings, replayed
from policies.policy import Outcome
from tests.gateway.conftest import MODEL, Running, start_gateway
from tests.support.upstream import Wire, delta

NGRAM = ShadowArm("ngram:3", Method.NGRAM, 3, {"prompt_lookup_min": 2, "prompt_lookup_max": 4})
SUFFIX = ShadowArm("suffix:24", Method.SUFFIX, 24)
_PATIENCE_S = 90.0  # the process is a nice one: on a busy machine it may have to wait
TEXT = "the quick brown fox jumps over the lazy dog and then it sleeps. "


async def _says_it_again(wire: Wire) -> None:
    await wire.begin_stream()
    for word in (TEXT * 4).split(" ")[:-1]:
        await wire.chunk(delta(word + " "))
    usage = b'{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 52, "total_tokens": 59}}'
    await wire.chunk(b"data: " + usage + b"\n\n")
    await wire.chunk(b"data: [DONE]\n\n")
    await wire.end_stream()


def _policy(running: Running) -> Learned:
    policy = running.gateway.models[MODEL].policy
    assert isinstance(policy, Learned)
    return policy


def _replay(running: Running) -> ShadowDrafting:
    found = running.gateway.models[MODEL].shadow
    assert found is not None
    return found


def _seen(policy: Learned) -> dict[tuple[str, str], float]:
    """Return how often acceptance was observed, by arm and backend."""
    seen: dict[tuple[str, str], float] = {}
    for key, sums in policy.statistics.buckets(ACCEPTANCE).items():
        seen[key[ARM], key[BACKEND]] = seen.get((key[ARM], key[BACKEND]), 0.0) + sums[0]
    return seen


@pytest.mark.parametrize("fast", [True, False])
async def test_an_answer_of_one_method_tells_of_the_others(fast: bool) -> None:
    methods = {"a": "baseline", "b": "suffix", "c": "ngram"}
    async with start_gateway(
        methods, {"name": "learned", "seed": 1, "shadow_drafting": {"cpu": 1}}, fast=fast
    ) as running:
        for upstream in running.upstreams.values():
            upstream.behaviour = _says_it_again
        to_a = {"x-gateway-backend": "a"}
        answers = [await running.chat(TEXT, stream=True, headers=to_a) for _ in range(3)]
        assert {one.status_code for one in answers} == {200}
        policy = _policy(running)
        await running.until(lambda: _seen(policy).get(("suffix:24", ""), 0.0) > 2.5, _PATIENCE_S)
        seen = _seen(policy)
        # Each request once: as its engine had it, and for the two that were not asked.
        assert seen["baseline:0", "a"] == pytest.approx(seen["suffix:24", ""]) == pytest.approx(seen["ngram:3", ""])
        assert set(seen) == {("baseline:0", "a"), ("suffix:24", ""), ("ngram:3", "")}
        model, key = policy.fitted({}).acceptance, next(iter(policy.statistics.buckets(ACCEPTANCE)))[2:]
        # It repeats itself: suffix drafting does better than the calibration has it, which knows no repetition.
        assert model.tokens_per_step("suffix:24", "b", key) > model.tokens_per_step("ngram:3", "c", key) > 1.5
        page = (await running.client.get("/metrics")).text
        assert 'gateway_shadow_texts_total{model="m",result="replayed"} 3.0' in page
    assert not _children()


async def test_a_whole_answer_will_do_and_its_own_method_is_not_counted_twice() -> None:
    policy_settings = {"name": "learned", "seed": 1, "shadow_drafting": {"cpu": 1}}
    async with start_gateway({"a": "baseline", "b": "suffix"}, policy_settings) as running:
        document = {
            "choices": [{"index": 0, "message": {"role": "assistant", "content": TEXT * 4}}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 52, "total_tokens": 59},
            "metrics": {"speculative_decoding": {"num_draft_tokens": 60, "num_accepted_draft_tokens": 26}},
        }

        async def whole(wire: Wire) -> None:
            await wire.json(document)

        running.upstreams["b"].behaviour = whole
        for _ in range(2):
            assert (await running.chat(TEXT, headers={"x-gateway-backend": "b"})).status_code == 200
        policy = _policy(running)
        await running.until(lambda: _replay(running).replayed == 2, _PATIENCE_S)
        _replay(running).deliver(running.gateway.models[MODEL].fallback)
        assert _seen(policy) == {("suffix:24", "b"): pytest.approx(2.0)}
        assert policy._lookup_bias.corrected("suffix:24", 4.0) < 4.0  # its engine got less than the replay


@pytest.mark.parametrize(
    ("methods", "policy"),
    [
        ({"a": "baseline", "b": "suffix"}, {"name": "least_loaded"}),
        ({"a": "baseline", "b": "baseline"}, {"name": "learned"}),
        ({"a": "baseline", "b": "suffix"}, {"name": "learned", "shadow_drafting": {"sample": 0}}),
    ],
)
async def test_nothing_is_kept_where_nobody_wants_it(methods: dict[str, str], policy: dict[str, Any]) -> None:
    async with start_gateway(methods, policy) as running:
        assert running.gateway.models[MODEL].shadow is None
        assert (await running.chat()).status_code == 200


def _outcome(endpoint: Endpoint = Endpoint.CHAT) -> Outcome:
    from policies.policy import Decision

    features = RequestFeatures("m", endpoint, temperature=0.0)
    return Outcome(features, Decision("a", "p", "r"), Method.BASELINE, 200, 0.1, 0.01, 1.0, 10, 52, None)


class _Listener(Learned):
    def __init__(self) -> None:
        from policies.learned.policy import LearnedSettings

        super().__init__(LearnedSettings())
        self.heard: list[Outcome] = []

    def observe_shadow(self, outcome: Outcome) -> None:
        self.heard.append(outcome)


BODY = orjson.dumps({"messages": [{"role": "user", "content": TEXT}]})
ANSWER = orjson.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": TEXT * 4}}]})


def _add(replay: ShadowDrafting, answer: bytes = ANSWER) -> None:
    outcome = _outcome()
    kept = replay.begin(outcome.request, BODY)
    assert kept is not None
    kept.keep(answer)
    replay.add(outcome, BODY, kept, streamed=False)


async def _until(condition: Any) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_full_queue_leaves_texts_out_and_counts_them() -> None:
    policy = _Listener()
    replay = ShadowDrafting(policy, ShadowSettings(queue=3), [NGRAM])  # not started: nothing empties it
    early = replay.begin(_outcome().request, b"{}")
    for _ in range(3):
        _add(replay)
    assert replay.begin(_outcome().request, b"{}") is None, "while the queue is full nothing is kept"
    assert early is not None
    early.keep(b"{}")
    replay.add(_outcome(), b"{}", early, streamed=False)
    assert (replay.waiting, replay.dropped) == (3, 2)
    small = ShadowDrafting(policy, ShadowSettings(queue_mib=0.001), [NGRAM])
    for _ in range(5):
        _add(small)
    assert small.dropped > 0


def test_long_texts_and_what_is_no_text_are_left_alone() -> None:
    replay = ShadowDrafting(_Listener(), ShadowSettings(max_text_kib=1), [NGRAM])
    chat = _outcome().request
    assert replay.begin(chat, b"x" * 1025) is None
    assert replay.begin(_outcome(Endpoint.EMBEDDINGS).request, b"{}") is None
    kept = replay.begin(chat, b"{}")
    assert kept is not None
    kept.keep(b"x" * 1000)
    kept.keep(b"x" * 1000)
    replay.add(_outcome(), b"{}", kept, streamed=True)
    assert replay.waiting == 0


async def test_the_working_directory_has_no_say_in_what_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "__init__.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    replay = ShadowDrafting(_Listener(), ShadowSettings(cpu=1.0), [NGRAM])
    replay.start()
    try:
        _add(replay)
        await _until(lambda: replay.replayed + replay.failed == 1)
        assert replay.replayed == 1
    finally:
        replay.stop()


async def test_nonsense_and_a_killed_process_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.shadow.replay._AGAIN_S", 0.0)
    policy = _Listener()
    replay = ShadowDrafting(policy, ShadowSettings(cpu=1.0), [NGRAM, SUFFIX])
    replay.start()
    try:
        _add(replay, b'{"choices": 7}')
        _add(replay, b"\xff\x00 not JSON")
        _add(replay)
        await _until(lambda: replay.replayed == 3)
        process = replay._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        _add(replay)  # finds it dead
        await _until(lambda: replay.failed == 1)
        _add(replay)  # is given to a new one
        await _until(lambda: replay.replayed == 4)
        replay.deliver(Fallback())
        assert [set(one.shadow) for one in policy.heard] == [{"ngram:3", "suffix:24"}] * 2
        assert policy.heard[0].shadow == policy.heard[1].shadow
    finally:
        replay.stop()
    assert replay._process is None


def test_token_ids_are_taken_where_the_engine_sent_them() -> None:
    prompt, output = list(range(100, 140)), [*range(100, 130), *range(100, 130)]
    answer = orjson.dumps(
        {"prompt_token_ids": prompt, "choices": [{"index": 0, "text": "unlike the ids", "token_ids": output}]}
    )
    body = orjson.dumps({"prompt": "unlike them too"})
    asked = {
        "endpoint": "completions",
        "streamed": False,
        "body": len(body),
        "answer": len(answer),
    }
    arms = [{"arm": "ngram:3", "method": "ngram", "k": 3, "config": dict(NGRAM.config)}]
    told = subprocess.run(
        [sys.executable, "-m", "gateway.shadow"],
        input=orjson.dumps(arms) + b"\n" + orjson.dumps(asked) + b"\n" + body + answer,
        stdout=subprocess.PIPE,
        check=True,
        timeout=_PATIENCE_S,
    )
    assert orjson.loads(told.stdout)["tokens_per_step"] == replayed(prompt, output, [NGRAM])


def _children() -> list[str]:
    """Return the processes that replay lookups and are our own."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    command = file.read()
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if b"gateway.shadow" in command and parent == os.getpid():
                found.append(name)
    return found
