"""What can be compared, before a gateway is asked."""

from __future__ import annotations

from backends.backend import Backend
from backends.draft_schedule import DraftSchedule, Speculation
from backends.health import Health, State
from backends.speculation import Method
from gateway.config.settings.compare import ComparisonSettings
from gateway.rooms.compare.definition import begun


def test_a_drained_replica_serves_as_the_pool_file_says() -> None:
    plain = Backend("a", "m", Method.BASELINE, "http://127.0.0.1:8001", health=Health(State.UP))
    tried = Backend("b", "m", Method.NGRAM, "http://127.0.0.1:8002", 4, health=Health(State.DRAINING))
    tried.observe({"no_speculation": "it does not speculate"}, Speculation(Method.BASELINE, DraftSchedule(0)))
    definition = begun(ComparisonSettings(a="a", b="b"), [plain, tried], "learned", 0.0)
    tried.observe({}, tried.said)  # the engine before has left
    tried.health = Health(State.UP)
    assert definition.changed([plain, tried], "learned") == ""
    assert definition.still_holds([plain, tried], "learned", "b")
