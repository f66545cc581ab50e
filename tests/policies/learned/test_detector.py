"""What the detector finds, how soon, and what it does not find."""

from __future__ import annotations

import math
from random import Random

import pytest

from backends.backend import Backend
from backends.speculation import Method
from policies.learned.detector import LONGEST_S, REST_S, Detector
from tests.policies.learned.pool import request

KIND = "eagle3:3", "chat", "0/0"


def healthy() -> Detector[int]:
    """Return a detector that knows the kind of request."""
    detector: Detector[int] = Detector()
    for _ in range(100):
        detector.observe_drafts("other", KIND, 2.4, 2.4, None, (0, 0), None, 0.0)
    return detector


def observe(
    detector: Detector[int], share: float, client: str = "", lesson: int | None = None, drafts: tuple[int, int] = (0, 0)
) -> list[int]:
    """Add an answer with a share of the accepted drafts that were expected; return what may be learned."""
    source = detector.see(request(client=client, template=client), 48)
    observed = 1.0 + share * 1.4
    return [*detector.observe_drafts("e", KIND, 2.4, observed, source, drafts, lesson, 0.0)]


@pytest.mark.parametrize("ratio", [1.6, 2.0, 4.0])
def test_slower_steps_are_found_within_five_answers(ratio: float) -> None:
    detector: Detector[int] = Detector()
    for number in range(5):
        detector.observe_speed("e", ratio, detector.see(request(), 48), float(number))
    assert detector.effect("e", 4.0)[0] == pytest.approx(ratio, rel=0.05)
    assert f"{ratio:.1f} times as long" in detector.reasons["e"]
    assert 1.0 < detector.effect("e", 40.0)[0] < 1.0 + (ratio - 1.0) / 4, "it is tried again"
    for _ in range(5):
        detector.observe_speed("e", 1.0, None, 5.0)
    assert not detector.found


def test_healthy_replicas_are_not_accused_in_100_000_answers() -> None:
    detector, rng = Detector[int](), Random(1)
    for _ in range(100_000):
        detector.observe_speed("e", rng.lognormvariate(0.0, 0.12), None, 0.0)
        detector.observe_drafts(
            "e", KIND, 2.4, min(4.0, max(1.0, rng.lognormvariate(0.85, 0.25))), None, (0, 0), 1, 0.0
        )
    assert not detector.found


@pytest.mark.parametrize(("share", "what"), [(0.0, "silent"), (0.2, "accepted less")])
def test_a_drafter_that_fails_is_found_and_what_it_taught_is_dropped(share: float, what: str) -> None:
    detector = healthy()
    assert observe(detector, 1.0, lesson=0) == [0]
    released = [lesson for number in range(12) for lesson in observe(detector, share, lesson=number)]
    assert not released
    (finding,) = detector.found["e"]
    assert what in str(finding)
    assert ("e" in detector.silent) is (what == "silent")
    assert detector.effect("e", 0.0)[1] == pytest.approx(share, abs=0.05)
    for _ in range(8):
        observe(detector, 1.0)
    assert not detector.found
    assert observe(detector, 1.0, lesson=7) == [7]


@pytest.mark.parametrize("few", [0.2, 0.5, 0.9])
def test_drafts_that_vary_much_accuse_nobody_once_that_is_known(few: float) -> None:
    detector, rng = Detector[int](), Random(2)
    for number in range(20_000):
        observe(detector, 0.0 if rng.random() < few else rng.uniform(1.0, 2.0), f"client {number % 5}")
        if number == 300:
            detector.renew("e")
        assert number < 300 or not detector.found


def test_what_stays_so_is_learned() -> None:
    detector = healthy()
    released = [lesson for number in range(200) for lesson in observe(detector, 0.1, lesson=number)]
    assert released
    assert min(released) > 90


def test_one_client_accuses_nobody_while_others_are_answered() -> None:
    detector = healthy()
    for number in range(400):
        if number % 10 == 0:
            detector.see(request(client="other"), 48)
        observe(detector, 0.0, "liar")
    assert not detector.found
    for _ in range(4):
        observe(detector, 0.0, "other")
    assert "e" in detector.silent


@pytest.mark.parametrize("client", ["other", "liar"])
def test_short_answers_with_ever_other_templates_are_still_of_one_client(client: str) -> None:
    detector = healthy()
    observe(detector, 1.0, client)
    for number in range(200):
        source = detector.see(request(client="liar", template=str(number)), 8)
        detector.observe_speed("e", 3.0, source, float(number))
    assert bool(detector.found) is (client == "liar")


def test_the_counters_of_an_engine_acquit_it() -> None:
    detector = healthy()
    for number in range(60):
        observe(detector, 0.0, drafts=(100 * number, 140 * number))
    assert not detector.found


def test_requests_from_which_little_is_expected_are_no_evidence() -> None:
    detector = healthy()
    for _ in range(100):
        detector.observe_drafts("e", KIND, 1.15, 1.0, None, (0, 0), None, 0.0)
    assert not detector.found


def test_a_change_of_the_engine_ends_it_and_is_its_cause_next_time() -> None:
    detector = healthy()
    for _ in range(12):
        observe(detector, 0.0)
    detector.renew("e", "since_restart")
    assert not detector.found
    assert not detector.silent
    for _ in range(12):
        observe(detector, 0.0)
    assert detector.silent["e"].cause == "since_restart"
    assert "since restart" in str(detector.silent["e"])
    assert math.isfinite(detector.silent["e"].expected)


def test_under_other_policies_it_rests_longer_with_each_relapse() -> None:
    detector = healthy()
    pool = [Backend(name, "m", Method.EAGLE3, "http://a", 3) for name in ("e", "f")]
    for _ in range(12):
        observe(detector, 0.0)
    assert detector.admitted(pool, 0.0) == pool[1:]
    assert detector.admitted(pool[:1], 0.0) == pool[:1], "if nothing else is left it serves"
    assert detector.admitted(pool, -3600.0) == pool, "the clock was set back"
    assert detector.admitted(pool, REST_S + 1.0) == pool
    assert LONGEST_S > REST_S
    detector.forget("e")
    assert detector.admitted(pool, 0.0) == pool
