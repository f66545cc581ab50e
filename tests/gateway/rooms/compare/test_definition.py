"""What can be compared, and for how long it holds, before a gateway is asked."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from backends.backend import Backend
from backends.draft_schedule import DraftSchedule, Speculation
from backends.engine import Said
from backends.health import Health, State
from backends.speculation import Method
from gateway.rooms.compare.definition import Definition, WrongArmsError, begun, block_for, next_question
from gateway.rooms.compare.settings import ComparisonSettings
from policies.experiment.evidence import BLOCKS, REST, USUAL, Evidence, Sums
from policies.statistics import Statistics

A_AND_B = ComparisonSettings(a="a", b="b")


def replica(name: str, method: Method = Method.BASELINE, k: int = 0, version: str = "", **fields: Any) -> Backend:
    made = Backend(name, "m", method, f"http://127.0.0.1/{name}", k, health=Health(State.UP), **fields)
    made.set_engine(Said(version=version))
    return made


def test_a_drained_replica_serves_as_the_pool_file_says() -> None:
    plain, tried = replica("a"), replica("b", Method.NGRAM, 4)
    tried.health = Health(State.DRAINING)
    tried.observe({"no_speculation": "it does not speculate"}, Speculation(Method.BASELINE, DraftSchedule(0)))
    definition = begun(A_AND_B, [plain, tried], "learned", 0.0)
    tried.observe({}, tried.declared)  # the engine before has left
    tried.health = Health(State.UP)
    assert definition.changed([plain, tried], "learned") == ""
    assert definition.still_holds([plain, tried], "learned", "b")


def test_what_was_found_holds_until_engines_have_another_version() -> None:
    pool = [replica("a", version="0.31.0")]
    pool += [replica(name, Method.NGRAM, 4, version) for name, version in (("b", "0.31.0"), ("c", "0.32.0"))]
    definition = begun(A_AND_B, pool, "learned", 0.0)
    assert definition.versions == ["0.31.0", "0.32.0"]
    for version, holds in (("0.32.0", True), ("", True), ("0.33.0", False)):
        pool[1].set_engine(Said(version=version), is_new=True)
        assert definition.still_holds(pool, "learned", "b") is holds
        assert bool(definition.changed(pool, "learned")) is not holds
    assert "another vLLM now than 0.31.0 and 0.32.0" in definition.changed(pool, "learned")
    pool[1].set_engine(Said(version="0.31.0"), is_new=True)
    beside = replica("d", Method.NGRAM, 4, "0.33.0")
    assert definition.changed([*pool, beside], "learned") == "", "it is in no arm"
    untold = definition.model_copy(update={"versions": []})
    assert untold.still_holds(pool, "learned", "b")


def test_it_is_over_once_an_arm_serves_otherwise_or_is_gone() -> None:
    pool = [replica("a"), replica("b", Method.EAGLE3, 3)]
    definition = begun(A_AND_B, pool, "learned", 0.0)
    pool[1].observe({}, Speculation(Method.EAGLE3, DraftSchedule(0)))
    assert definition.changed(pool, "learned") == "", "an engine that has not told k yet"
    pool[1].observe({}, Speculation(Method.SUFFIX, DraftSchedule(24)))
    assert definition.changed(pool, "learned") == "b serves as suffix:24 now"
    assert definition.changed(pool[:1], "learned") == "no replica of b is in the pool any more"
    turns = begun(ComparisonSettings(policies=["round_robin", "least_loaded"]), pool, "round_robin", 0.0)
    assert (turns.changed(pool[:1], "least_loaded"), turns.changed(pool, "static")) == ("", "static is the policy now")


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"a": "egle3", "b": "b"}, "no replica has the name, .* 'egle3'; did you mean 'eagle3'?"),
        ({"a": "baseline", "b": "a"}, "a would be in both arms"),
        ({"a": "eagle3", "b": "eagle3"}, "a and b are the same"),
        ({"a": " , ", "b": "b"}, "an arm has no replica"),
        ({"a": "a", "b": "b", "depths": [0, 3]}, "either two arms, or depths, or policies"),
        ({"depths": [0]}, "two depths at least"),
        ({"depths": [0, 9]}, "draft 3 tokens at most"),
        ({"policies": ["static", "random"]}, "name the present policy and another one, such as learned,least_loaded"),
        ({"policies": ["learned", "leastloaded"]}, "there is no policy 'leastloaded'; did you mean 'least_loaded'?"),
        ({"policies": ["learned", "static"]}, "static needs settings"),
        ({"policies": ["learned", "lmetric"]}, "lmetric needs settings, or all requests to learn from"),
    ],
)
def test_what_is_not_there_or_not_apart_is_refused(asked: dict[str, Any], problem: str) -> None:
    pool = [replica("a"), replica("b", Method.EAGLE3, 3, draft_depth=True)]
    with pytest.raises(WrongArmsError, match=problem):
        begun(ComparisonSettings(**asked), pool, "learned", 0.0)


def test_what_one_replica_alone_cannot_tell_is_refused() -> None:
    for asked, problem in (
        (ComparisonSettings(policies=["learned", "least_loaded"]), "policies choose among replicas, and there is one"),
        (ComparisonSettings(depths=[0, 3]), "no replica has draft_depth: true"),
    ):
        with pytest.raises(WrongArmsError, match=problem):
            begun(asked, [replica("a")], "learned", 0.0)


def test_by_themselves_all_methods_are_compared_two_at_a_time() -> None:
    pool = [replica("a"), replica("b", Method.EAGLE3, 3), replica("c", Method.SUFFIX, 24)]
    past: list[Definition] = []
    pairs: list[frozenset[str]] = []
    for number in range(4):
        question = next_question(ComparisonSettings(), pool, past)
        pairs.append(frozenset([question.a, question.b]))
        past.insert(0, begun(question, pool, "learned", number + 1.0))
    assert pairs[0] == pairs[3]
    assert {*pairs} == {frozenset(pair) for pair in combinations(("baseline", "eagle3", "suffix"), 2)}
    pool[0].health = Health(State.DRAINING)
    question = next_question(ComparisonSettings(), pool, [])
    assert {question.a, question.b} == {"eagle3", "suffix"}, "those of which a replica serves"


def test_a_time_that_is_too_short_for_any_result_is_refused() -> None:
    pool = [replica("a"), replica("b")]
    for mean_s, least_s in ((None, 80.0), (6.0, 480.0)):
        with pytest.raises(WrongArmsError, match=f"too short for any result; it takes {least_s:g} s at least, 8"):
            begun(ComparisonSettings(a="a", b="b", for_s=least_s - 1.0), pool, "learned", 0.0, mean_s)
        begun(ComparisonSettings(a="a", b="b", for_s=least_s), pool, "learned", 0.0, mean_s)


@pytest.mark.parametrize(("mean_s", "block_s"), [(None, 10.0), (0.2, 10.0), (3.01, 31.0), (1000.0, 3600.0)])
def test_blocks_fit_the_requests_so_far(mean_s: float | None, block_s: float) -> None:
    assert block_for(mean_s) == block_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("for_s", "asked", "block_s"), [(7200.0, None, 10.0), (86_400.0, 10.0, 85.0), (None, 900.0, 900.0)]
)
def test_a_comparison_of_days_has_no_more_blocks_than_are_kept(
    for_s: float | None, asked: float | None, block_s: float
) -> None:
    question = ComparisonSettings(a="a", b="b", for_s=for_s, block_s=asked)
    plan = begun(question, [replica("a"), replica("b")], "least_loaded", 0.0, 1.0).plan()
    assert plan.block_s == block_s
    names = [*plan.arms, REST, USUAL]
    statistics = Statistics([BLOCKS], lambda: 86_400.0)  # all of it on one day
    for number in range(round((for_s or 0.0) / block_s)):
        for name in names:
            statistics.add(BLOCKS, (plan.id, str(number), name, "one"), *Sums(weight=1.0))
    blocks = Evidence(plan, statistics).blocks.values()
    assert all([*each] == sorted(names) for each in blocks)
