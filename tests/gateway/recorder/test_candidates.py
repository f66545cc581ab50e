"""The candidates of a decision, in columns that are used again while they are the same."""

from __future__ import annotations

import orjson

from backends.backend import Backend
from backends.draft_schedule import DraftSchedule, Speculation
from backends.speculation import Method
from gateway.recorder.document import RecordBuilder, RequestNotes
from policies.decision import Decision


def test_the_method_of_a_candidate_is_the_one_that_its_engine_shows() -> None:
    backends = [Backend(name, "m", Method.BASELINE, "http://x") for name in ("a", "b")]
    columns, notes, decision = (
        RecordBuilder("none"),
        RequestNotes(print, keeps_answer=False, max_bytes=0),
        Decision("a", "p", "r"),
    )
    notes.candidates, notes.in_flight, notes.loads = backends, [0, 0], [each.load for each in backends]

    def methods() -> list[str]:
        found: list[str] = orjson.loads(orjson.dumps(columns._columns("m", notes, decision)["method"]))
        return found

    assert methods() == ["baseline", "baseline"]
    backends[1].observe({"speculation": "its engine speculates"}, Speculation(Method.CUSTOM_CLASS, DraftSchedule(3)))
    assert methods() == ["baseline", "custom_class"]
