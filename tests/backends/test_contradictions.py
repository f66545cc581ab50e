"""What an engine's counters say against the pool file."""

from __future__ import annotations

import pytest

from backends.backend import Backend
from backends.contradictions import compare, contradictions, observed, unlike_answers
from backends.draft_schedule import DraftSchedule, Speculation
from backends.engine import Said
from backends.engine_metrics import EngineMetrics
from backends.speculation import Method

BASELINE = Speculation(Method.BASELINE, DraftSchedule(0))
EAGLE3 = Speculation(Method.EAGLE3, DraftSchedule(3))
NGRAM3, NGRAM5, NGRAM9 = (Speculation(Method.NGRAM, DraftSchedule(k)) for k in (3, 5, 9))
SUFFIX = Speculation(Method.SUFFIX, DraftSchedule(24))
SCHEDULED = Speculation(Method.EAGLE3, DraftSchedule(3, (3, 3, 2, 0)))


def engine(k: int, drafts: int, draft_tokens: int, later_steps: int, speculates: bool | None = True) -> EngineMetrics:
    return EngineMetrics(
        drafts=drafts,
        draft_tokens=draft_tokens,
        accepted_per_position=(0,) * k,
        speculates=speculates,
        later_steps=later_steps,
        generation_tokens=later_steps,
    )


@pytest.mark.parametrize(
    ("said", "counters"),
    [
        (BASELINE, engine(0, 0, 0, 6812, speculates=False)),
        (EAGLE3, engine(3, 0, 0, 199)),
        (EAGLE3, engine(3, 3860, 11580, 3860)),
        (EAGLE3, engine(3, 500, 1500, 3860)),  # a sequence beyond the head's length keeps its batch from drafting
        (NGRAM5, engine(5, 0, 0, 4999)),
        (NGRAM5, engine(5, 581, 2801, 3519)),  # as vLLM on the CPU counted
        (NGRAM3, engine(3, 1999, 5997, 1999)),
        (NGRAM3, engine(3, 2000, 6000, 5000)),
        (SUFFIX, engine(24, 1787, 5795, 2287)),
        (SUFFIX, engine(24, 2400, 9000, 2400)),
        (SCHEDULED, engine(3, 0, 0, 10_000)),  # large batches draft nothing
        (SCHEDULED, engine(3, 1000, 2500, 1000)),
        (BASELINE, engine(0, 0, 0, 6812, speculates=None)),
        (EAGLE3, engine(0, 0, 0, 6812, speculates=None)),  # an old version, or no vLLM
    ],
)
def test_what_agrees_or_cannot_be_told_is_no_contradiction(said: Speculation, counters: EngineMetrics) -> None:
    found = contradictions(said, counters)
    assert found == {}
    assert observed(said, found, counters) is said


@pytest.mark.parametrize(
    ("said", "counters", "kinds", "method", "k"),
    [
        (EAGLE3, engine(0, 0, 0, 0, speculates=False), {"no_speculation"}, Method.BASELINE, 0),
        (EAGLE3, engine(3, 0, 0, 200), {"no_drafts"}, Method.BASELINE, 0),
        (NGRAM5, engine(5, 0, 0, 5000), {"no_drafts"}, Method.BASELINE, 0),
        (BASELINE, engine(5, 0, 0, 0), {"speculation"}, Method.CUSTOM_CLASS, 5),
        (BASELINE, engine(0, 850, 2550, 850), {"speculation"}, Method.CUSTOM_CLASS, 3),
        (EAGLE3, engine(5, 0, 0, 0), {"k"}, Method.EAGLE3, 5),
        (EAGLE3, engine(0, 400, 2000, 400), {"k"}, Method.EAGLE3, 5),
        (SCHEDULED, engine(5, 0, 0, 10), {"k"}, Method.EAGLE3, 5),
        (Speculation(Method.EAGLE3, DraftSchedule(3, (3, 2, 1))), engine(3, 400, 1200, 400), {"k"}, Method.EAGLE3, 3),
        (NGRAM9, engine(3, 800, 2400, 800), {"k"}, Method.NGRAM, 3),
        (NGRAM9, engine(3, 2000, 6000, 2000), {"k", "every_step"}, Method.CUSTOM_CLASS, 3),
        (NGRAM3, engine(3, 2000, 6000, 2005), {"every_step"}, Method.CUSTOM_CLASS, 3),
    ],
)
def test_a_contradiction_and_what_is_observed_instead(
    said: Speculation, counters: EngineMetrics, kinds: set[str], method: Method, k: int
) -> None:
    found = contradictions(said, counters)
    assert found.keys() == kinds
    assert observed(said, found, counters) == (method, DraftSchedule(k))


@pytest.mark.parametrize("draft_depth", [False, True])
def test_no_drafts_contradict_nothing_where_requests_may_ask_for_none(draft_depth: bool) -> None:
    backend = Backend("a", "m", Method.EAGLE3, "http://a", 3, draft_depth=draft_depth)
    assert compare(backend, engine(3, 0, 0, 200)) is not draft_depth
    assert backend.method is (Method.EAGLE3 if draft_depth else Method.BASELINE)


@pytest.mark.parametrize(
    ("roots", "flags", "said"),
    [
        (("meta-llama/Llama-3.1-8B", "/models/llama-3.1-8b/"), ((), ()), []),
        (("/models/llama-8b", "/models/llama-8b-fp8"), ((), None), ["have loaded /models/llama-8b and"]),
        (("/models/llama-8b", None), (("--dtype", "bfloat16"), None), []),
        ((None, None), (("--quantization=fp8",), ("--seed", "1")), ["are started with unlike --quantization"]),
        ((None, None), (("--watermark-config", "{}"), ()), ["are started with unlike --watermark-config"]),
    ],
)
def test_engines_whose_answers_differ_under_one_name_are_said(
    roots: tuple[str | None, ...], flags: tuple[tuple[str, ...] | None, ...], said: list[str]
) -> None:
    backends = []
    for name, root, own in zip("ab", roots, flags, strict=True):
        backends.append(Backend(name, "m", Method.BASELINE, "http://a", flags=own))
        backends[-1].set_engine(Said(card={"root": root}))
    found = list(unlike_answers(backends))
    assert all("answers differ by replica" in each for each in found)
    assert all(f"its engines {what}" in each for what, each in zip(said, found, strict=True))
