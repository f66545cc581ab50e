"""Tokens per step as answers show them, beside those that their engine counts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from random import Random

import pytest

from backends.engine_metrics import EngineMetrics
from backends.step_comparison import StepComparison

PROBE_S = 2.0
STEP_S = 0.02


def readings(
    seed: int, shown_over_true: float, *, others: float = 0.0, for_s: float = 3600.0, per_s: float = 2.0
) -> Iterator[tuple[float, EngineMetrics, tuple[float, float]]]:
    """Yield what probes of an engine see: answers of many lengths, and a mix of traffic that changes every 2 min.

    Parameters
    ----------
    shown_over_true
        Tokens per step that answers show, over the true ones.
    others
        Share of the answers that go to somebody else; these have four tokens per step.
    """
    rng = Random(seed)
    running: list[tuple[float, float, float, float, bool]] = []  # end, begin, tokens, steps, whether it is ours
    tokens = steps = seen_tokens = seen_steps = 0.0
    next_s, probe_s = rng.expovariate(per_s), PROBE_S
    while probe_s < for_s:
        while next_s < probe_s:
            is_own = rng.random() >= others
            kind = int(next_s / 120.0) % 2
            per_step = min(4.0, max(1.0, (1.5, 2.5)[kind] * math.exp(rng.gauss(0.0, 0.3)))) if is_own else 4.0
            length = rng.lognormvariate(5.0, 1.0)
            needed = length / per_step
            heapq.heappush(running, (next_s + needed * STEP_S, next_s, length, needed, is_own))
            next_s += rng.expovariate(per_s)
        while running and running[0][0] <= probe_s:
            _, _, length, needed, is_own = heapq.heappop(running)
            tokens, steps = tokens + length, steps + needed
            if is_own:
                seen_tokens += length
                seen_steps += needed / shown_over_true
        done = [((probe_s - began_s) / STEP_S, length / needed) for _, began_s, length, needed, _ in running]
        engine = EngineMetrics(
            generation_tokens=round(tokens + sum(made * per_step for made, per_step in done)),
            first_steps=0,
            later_steps=round(steps + sum(made for made, _ in done)),
        )
        yield probe_s, engine, (seen_tokens, seen_steps)
        probe_s += PROBE_S


def found(comparison: StepComparison, *args: float, **options: float) -> list[float]:
    """Return the times at which a difference begins."""
    began: list[float] = []
    for now_s, engine, answered in readings(int(args[0]), args[1], **options):
        before = comparison.difference
        comparison.add(engine, answered, 4, now_s)
        if before is None and comparison.difference is not None:
            began.append(now_s)
    return began


@pytest.mark.slow
def test_answers_that_show_what_the_engine_counts_differ_in_nothing() -> None:
    """Ten hours of traffic whose mix changes, and answers that last up to a minute."""
    assert [found(StepComparison(), seed, 1.0) for seed in range(10)] == [[]] * 10


@pytest.mark.parametrize("factor", [0.7, 0.9, 1.1, 1.5])
def test_a_difference_is_found_and_measured(factor: float) -> None:
    for seed in range(5):
        comparison = StepComparison()
        began = found(comparison, seed, factor, for_s=1800.0)
        assert len(began) == 1
        assert began[0] <= 600.0
        difference = comparison.difference
        assert difference is not None
        assert difference.shown / difference.counted == pytest.approx(factor, rel=0.03)


def test_others_explain_a_difference_as_far_as_they_can() -> None:
    """A third of others, with more tokens per step than ours, is no difference; nor can a small one be told from it."""
    assert found(StepComparison(), 0, 1.0, others=0.33) == []
    assert found(StepComparison(), 0, 1.1, others=0.33) == []
    comparison = StepComparison()
    assert len(found(comparison, 0, 0.4, others=0.33)) == 1
    figures = comparison.figures(4)
    assert figures is not None
    assert 0.25 < figures["share_of_others"] < 0.45
    assert figures["counted_at_least"] < figures["counted_at_most"]
    assert comparison.difference is not None
    assert comparison.difference.counted == pytest.approx(figures["counted_at_least"])


def feed(comparison: StepComparison, shown: float, windows: int, at: int = 0, restarted: bool = False) -> None:
    for number in range(at, at + windows):
        made = number - (at if restarted else 0)
        engine = EngineMetrics(generation_tokens=6000 * made, later_steps=3000 * made)
        comparison.add(engine, (6000.0 * number, 6000.0 / shown * number), 4, 20.0 * number)


def test_a_difference_ends_when_the_two_agree_again_or_the_engine_is_another_one() -> None:
    comparison = StepComparison()
    feed(comparison, shown=3.0, windows=8)
    assert comparison.difference is None  # seven windows
    feed(comparison, shown=3.0, windows=2, at=8)
    assert str(comparison.difference) == "its answers show 3.00 tokens per step where its engine counts 2.00"
    feed(comparison, shown=3.0, windows=1, at=10, restarted=True)
    assert comparison.difference is None
    assert comparison.figures(4) is None


def test_tokens_of_others_took_between_one_step_and_the_least() -> None:
    comparison = StepComparison()
    for number in range(2):
        engine = EngineMetrics(generation_tokens=6000 * number, later_steps=3000 * number)
        comparison.add(engine, (3000.0 * number, 2000.0 * number), 4, 20.0 * number)
    counted = {"counted_at_least": 3000 / (3000 - 3000 / 4), "counted_at_most": 4.0}
    assert comparison.figures(4) == pytest.approx({"shown": 1.5, **counted, "share_of_others": 0.5})
