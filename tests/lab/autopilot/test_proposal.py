"""Which replicas change, whether that is worth it, and when it is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.calibration.calibration import load_calibration
from backends.speculation import Method
from backends.validation import UsageError
from lab.autopilot.change import Floor
from lab.autopilot.journal import Change, Journal, Speculation, Step, only_one
from lab.autopilot.proposal import Proposal, Rule, assigned, methods_for
from lab.plan.mixes import kinds, machine_of
from lab.statistics import Interval

BASELINE = Speculation(method=Method.BASELINE)
SUFFIX = Speculation(method=Method.SUFFIX)
HEAD = Speculation(method=Method.EAGLE3, config={"num_speculative_tokens": 3, "model": "/weights/own-head"})
CALIBRATION = load_calibration("llama-3.1-8b-h100")
KINDS = kinds(
    CALIBRATION,
    machine_of(CALIBRATION),
    4096,
    [(Method.BASELINE, (0,)), (Method.SUFFIX, (24,)), (Method.EAGLE3, (2, 3))],
)
B, S, E2, E3 = KINDS


def test_as_few_replicas_as_possible_change_and_heads_keep_their_weights() -> None:
    present = {"a": SUFFIX, "b": BASELINE, "c": HEAD, "d": BASELINE}
    changes, kept = assigned([B, E3, E3, S], present)
    assert (changes, kept) == ({"d": HEAD}, {"a": SUFFIX, "b": BASELINE, "c": HEAD})
    changes, kept = assigned([E2, E2, S, S], present)
    own = HEAD.model_copy(update={"config": {"num_speculative_tokens": 2, "model": "/weights/own-head"}})
    assert (sorted(changes), kept) == (["b", "c", "d"], {"a": SUFFIX})
    assert sorted(map(str, changes.values())) == sorted(map(str, (own, own, SUFFIX)))


def test_only_methods_that_every_engine_runs_are_tried_unasked() -> None:
    tried = [method for method, _ in methods_for([BASELINE, HEAD], [])]
    assert tried == [Method.BASELINE, Method.NGRAM, Method.EAGLE3]
    assert Method.SUFFIX in [method for method, _ in methods_for([BASELINE], ["suffix"])]


@pytest.mark.parametrize(
    ("gain", "restarts", "why"),
    [
        (Interval(0.08, 0.05, 0.11), 1, None),
        (Interval(0.08, -0.01, 0.17), 1, "may be chance"),
        (Interval(0.02, 0.01, 0.03), 1, "is less than"),
        (Interval(0.035, 0.03, 0.04), 1, "is less than 3.6%, which 1 restarts should bring"),
        (Interval(0.05, 0.04, 0.06), 4, "is less than 5.5%"),
        (None, 1, "cannot be told"),
        (Interval(0.5, 0.4, 0.6), 0, "the present replicas are best"),
    ],
)
def test_a_change_must_bring_more_than_chance_and_more_than_it_costs(
    gain: Interval | None, restarts: int, why: str | None
) -> None:
    names = [f"r{number}" for number in range(4)]
    changes = dict.fromkeys(names[:restarts], SUFFIX)
    found = Rule(0.03, 180.0, 7200.0).objection(Proposal(changes, dict.fromkeys(names[restarts:], BASELINE), gain))
    assert (found is None) if why is None else (found is not None and why in found)


def backend(state: str = "up", waiting: int = 0) -> dict[str, Any]:
    return {"state": state, "engine": {"waiting": waiting}}


@pytest.mark.parametrize(
    ("others", "rate", "why"),
    [
        ([backend(), backend(), backend()], 5.0, None),
        ([backend(), backend(), backend()], 13.0, "13.00 requests a second arrive, and the others serve 15.00"),
        ([backend("recovering"), backend("down"), backend()], 5.0, None),
        ([backend("down"), backend("draining"), backend()], 1.0, "1 of 4 replicas would be up, and 2 must be"),
        ([backend(waiting=4), backend(), backend()], 5.0, "4 requests wait"),
        ([backend(), backend("down"), backend()], 9.0, "the others serve 10.00"),
    ],
)
def test_no_replica_is_taken_out_below_the_floor(others: list[dict[str, Any]], rate: float, why: str | None) -> None:
    floor = Floor(0.5, 0.8, capacity=lambda fleet: 5.0 * len(fleet), rate=lambda: rate)
    names = ["out", "x", "y", "z"]
    found = floor.objection(dict(zip(names, [backend(), *others], strict=True)), "out", dict.fromkeys(names, BASELINE))
    assert (found is None) if why is None else (found is not None and why in found)


def test_the_last_replica_is_never_taken_out() -> None:
    floor = Floor(0.0, 1.0, capacity=lambda _fleet: 1e9, rate=lambda: 0.0)
    assert (
        floor.objection({"only": backend()}, "only", {"only": BASELINE}) == "0 of 1 replicas would be up, and 1 must be"
    )
    assert floor.objection({"only": backend("down")}, "only", {"only": BASELINE}) == "only is down"


def test_what_was_undone_or_did_not_start_is_not_tried_again_for_a_day(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.json")
    steps = [
        Step(backend="a", before=BASELINE, after=SUFFIX, done=True),
        Step(backend="b", before=BASELINE, after=HEAD),
    ]
    times: dict[str, Any] = {"model": "m", "began_s": 1000.0, "gain": 0.1, "low": 0.1, "high": 0.1}
    journal.changes = [
        Change(**times, steps=steps, outcome="undone", note="1.3 times"),
        Change(**times, steps=steps, outcome="failed"),
    ]
    journal.write()
    journal = Journal.read(journal.path)
    undone = {"a": HEAD, "b": SUFFIX}
    journal.changes.pop()
    assert "undone before: 1.3 times" in (journal.refuses("m", undone, 2000.0, 86400.0) or "")
    assert journal.refuses("m", {"a": HEAD}, 2000.0, 86400.0) is None
    assert journal.refuses("other", undone, 2000.0, 86400.0) is None
    assert journal.refuses("m", undone, 90_000.0, 86400.0) is None
    journal.changes[0].outcome = "failed"
    assert "did not start" in (journal.refuses("m", {"c": HEAD}, 2000.0, 86400.0) or "")
    assert journal.refuses("m", {"c": SUFFIX}, 2000.0, 86400.0) is None


def test_only_one_autopilot_changes_a_pool(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    with only_one(path), pytest.raises(UsageError, match="another `gateway autopilot --apply`"), only_one(path):
        pass
    path.write_text("{}x")
    with pytest.raises(UsageError, match="not a journal"):
        Journal.read(path)
