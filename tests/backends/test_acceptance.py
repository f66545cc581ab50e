"""What an engine's counters say of its drafts, between two readings and over the last minute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backends.engine_metrics import WINDOW_S, AcceptanceOfLate, CountedAcceptance, EngineMetrics

# As vLLM 0.32 counted after 24 answers.
NGRAM = EngineMetrics(
    generation_tokens=5244, drafts=581, draft_tokens=2801, accepted_tokens=1714, first_steps=24, later_steps=3519
)
BASELINE = EngineMetrics(generation_tokens=6844, first_steps=32, later_steps=6812)


def counted(before: EngineMetrics, after: EngineMetrics) -> CountedAcceptance:
    found = CountedAcceptance.between(before, after)
    assert found is not None
    return found


def test_steps_that_drafted_nothing_count_with_and_without_a_count_of_steps() -> None:
    found = counted(replace(NGRAM, **dict.fromkeys(COUNTS, 0)), NGRAM)
    assert found.tokens_per_step == pytest.approx(5244 / 3543)
    assert found.rate == pytest.approx(1714 / 2801)
    older = replace(NGRAM, later_steps=None)
    assert counted(EngineMetrics(), older).tokens_per_step == pytest.approx(5244 / (5244 - 1714))
    assert CountedAcceptance.between(EngineMetrics(later_steps=0), BASELINE) == CountedAcceptance(1.0, None, ())


COUNTS = ("generation_tokens", "drafts", "draft_tokens", "accepted_tokens", "first_steps", "later_steps")


def test_positions_that_an_engine_reports_later_count_from_zero() -> None:
    before = EngineMetrics(
        generation_tokens=30, drafts=10, draft_tokens=10, accepted_tokens=5, accepted_per_position=(5,)
    )
    after = EngineMetrics(
        generation_tokens=60, drafts=20, draft_tokens=40, accepted_tokens=18, accepted_per_position=(13, 3, 2)
    )
    assert counted(before, after).by_position == (0.8, 0.3, 0.2)


def test_an_engine_without_output_or_counters_has_none() -> None:
    assert CountedAcceptance.between(EngineMetrics(), EngineMetrics()) is None
    assert CountedAcceptance.between(None, EngineMetrics(generation_tokens=3)) is None


def test_only_the_last_minute_counts() -> None:
    of_late = AcceptanceOfLate()
    assert of_late.at(0.0) is None
    for at_s, tokens, accepted in [(0.0, 0, 0), (1.0, 100, 50), (100.0, 200, 50), (130.0, 300, 50)]:
        of_late.add(EngineMetrics(generation_tokens=tokens, accepted_tokens=accepted), at_s)
    found = of_late.at(131.0)
    assert found is not None
    assert found.tokens_per_step == 1.0
    assert of_late.at(131.0 + WINDOW_S) is None
