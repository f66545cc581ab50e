"""What can be compared, before a gateway is asked."""

from __future__ import annotations

import pytest

from backends.backend import Backend
from backends.draft_schedule import DraftSchedule, Speculation
from backends.engine import Said
from backends.health import Health, State
from backends.speculation import Method
from gateway.rooms.compare.definition import WrongArmsError, begun
from gateway.rooms.compare.settings import ComparisonSettings


def test_a_drained_replica_serves_as_the_pool_file_says() -> None:
    plain = Backend("a", "m", Method.BASELINE, "http://127.0.0.1:8001", health=Health(State.UP))
    tried = Backend("b", "m", Method.NGRAM, "http://127.0.0.1:8002", 4, health=Health(State.DRAINING))
    tried.observe({"no_speculation": "it does not speculate"}, Speculation(Method.BASELINE, DraftSchedule(0)))
    definition = begun(ComparisonSettings(a="a", b="b"), [plain, tried], "learned", 0.0)
    tried.observe({}, tried.said)  # the engine before has left
    tried.health = Health(State.UP)
    assert definition.changed([plain, tried], "learned") == ""
    assert definition.still_holds([plain, tried], "learned", "b")


def test_what_was_found_holds_until_engines_have_another_version() -> None:
    pool = [Backend("a", "m", Method.BASELINE, "http://127.0.0.1:8001", health=Health(State.UP))]
    pool += [Backend(name, "m", Method.NGRAM, "http://127.0.0.1:8002", 4, health=Health(State.UP)) for name in "bc"]
    for each, version in zip(pool, ("0.31.0", "0.31.0", "0.32.0"), strict=True):
        each.set_engine(Said(version=version))
    definition = begun(ComparisonSettings(a="a", b="b"), pool, "learned", 0.0)
    assert definition.versions == ["0.31.0", "0.32.0"]
    for version, holds in (("0.32.0", True), ("", True), ("0.33.0", False)):
        pool[1].set_engine(Said(version=version), is_new=True)
        assert definition.still_holds(pool, "learned", "b") is holds
        assert bool(definition.changed(pool, "learned")) is not holds
    assert "another vLLM now than 0.31.0 and 0.32.0" in definition.changed(pool, "learned")
    pool[1].set_engine(Said(version="0.31.0"), is_new=True)
    beside = Backend("d", "m", Method.NGRAM, "http://127.0.0.1:8003", 4, health=Health(State.UP))
    beside.set_engine(Said(version="0.33.0"))
    assert definition.changed([*pool, beside], "learned") == "", "it is in no arm"
    untold = definition.model_copy(update={"versions": []})
    assert untold.still_holds(pool, "learned", "b")


def test_a_time_that_is_too_short_for_any_result_is_refused() -> None:
    pool = [Backend(name, "m", Method.BASELINE, "http://127.0.0.1:8001", health=Health(State.UP)) for name in "ab"]
    for mean_s, least_s in ((None, 80.0), (6.0, 480.0)):
        with pytest.raises(WrongArmsError, match=f"too short for any result; it takes {least_s:g} s at least, 8"):
            begun(ComparisonSettings(a="a", b="b", for_s=least_s - 1.0), pool, "learned", 0.0, mean_s)
        begun(ComparisonSettings(a="a", b="b", for_s=least_s), pool, "learned", 0.0, mean_s)
