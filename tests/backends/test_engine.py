"""Which engine processes answer at one address: a restart, or several in turn."""

from __future__ import annotations

from typing import Any

import pytest

from backends.engine import Processes
from backends.engine_metrics import EngineMetrics, total

A, B = 100.0, 7.0  # when two processes started: the later one need not be the newer one's clock


def page(tokens: int, started_s: float = 0.0, **values: Any) -> EngineMetrics:
    return EngineMetrics(generation_tokens=tokens, started_s=started_s, **values)


@pytest.mark.parametrize(
    ("pages", "others"),
    [
        ([page(9, A), page(12, A)], [None, False]),
        ([page(9, A), page(12, B)], [None, True]),
        ([page(9, B), page(12, A)], [None, True]),
        ([page(9), page(12)], [None, None]),  # it does not say
        ([page(9), page(2)], [None, True]),
        ([page(9, prompt_tokens=5), page(9, prompt_tokens=4)], [None, True]),
        ([page(9), page(12, A)], [None, None]),
    ],
)
def test_another_process_is_seen_by_its_start_and_by_counters_that_fall(
    pages: list[EngineMetrics], others: list[bool | None]
) -> None:
    processes = Processes()
    assert [processes.take(each, 2.0 * number)[1] for number, each in enumerate(pages)] == others
    assert not processes.are_several


def test_pages_of_two_processes_in_turn_are_added_and_are_no_restarts() -> None:
    processes = Processes()
    for number in range(2):
        processes.take(page(900, A) if number == 0 else page(20, B), 2.0 * number)
    for number in range(2, 50):
        counted, is_other = processes.take(
            page(900 + number, A, running=2) if number % 2 == 0 else page(20 + number, B, running=1), 2.0 * number
        )
        assert is_other is False
        assert processes.are_several
        assert counted is not None
        if number > 3:
            assert (counted.generation_tokens, counted.running) == (920 + 2 * number - 1, 3)
    assert processes.take(page(1000, A), 200.0) == (total([page(1000, A), page(69, B, running=1)]), False)
    assert processes.take(page(1001, A), 500.0) == (page(1001, A), False), "the other one has gone"
    assert not processes.are_several


def test_processes_that_do_not_say_when_they_started_are_not_added() -> None:
    processes = Processes()
    taken = [processes.take(page(20 if number % 2 else 900), 2.0 * number) for number in range(20)]
    assert [is_other for _, is_other in taken].count(True) == 2
    assert taken[-1] == (None, False)
    assert processes.are_several
    for number in range(20):
        processes.take(page(1000 + number), 40.0 + 2.0 * number)
    assert not processes.are_several


def test_processes_that_started_at_once_are_several() -> None:
    """As two of one script do: vLLM tells the start in hundredths of a second."""
    processes = Processes()
    taken = [processes.take(page(20 if number % 2 else 900, A), 2.0 * number) for number in range(20)]
    assert taken[1:] == [(None, False)] * 19
    assert processes.are_several
    assert processes.take(page(1000, A), 400.0)[0] == page(1000, A)
    assert not processes.are_several


def test_an_engine_that_restarts_again_and_again_is_one() -> None:
    processes = Processes()
    for number in range(20):
        assert processes.take(page(0, A + number), 2.0 * number)[1] is not False
        assert not processes.are_several
    for number in range(20):
        processes.take(page(50 if number % 2 else 0), 60.0 + 20.0 * number)
        assert not processes.are_several
