"""Contradictions between the pool file and an engine's counters, and between the engines of a model."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from backends.backend import Backend
from backends.draft_schedule import DraftSchedule, Speculation
from backends.engine_metrics import EngineMetrics
from backends.launch.vllm_command import flag_value
from backends.probe import misnamed
from backends.reported import printable
from backends.speculation import Method, is_lossy

logger = logging.getLogger(__name__)

KINDS: Final = ("no_speculation", "no_drafts", "speculation", "k", "every_step")
"""Kinds of contradictions; an engine shows at most two at a time."""

SPARING: Final = frozenset({Method.NGRAM, Method.SUFFIX, Method.CUSTOM_CLASS})
"""Methods that draft only in some steps; all others draft k tokens in each step after a sequence's first."""

_LEAST_STEPS: Final = 200
"""Steps without a draft that contradict a method that drafts in every step."""
_LEAST_STEPS_SPARING: Final = 5000
"""The same for methods that draft only where text repeats: recorded ones drafted in 16% to 94% of their steps."""
_LEAST_DRAFTS: Final = 2000
"""Drafts needed before their share of the steps identifies a method that drafts in every step."""
_ALL: Final = 0.995
_NEAR: Final = 0.05
"""Tokens by which the mean draft may differ from k."""
_CHANGING: Final = ("--watermark-config", "--quantization", "--dtype", "--kv-cache-dtype")
"""Flags of vLLM that change answers."""


def contradictions(said: Speculation, engine: EngineMetrics) -> dict[str, str]:
    """Return how an engine's counters contradict its declared speculation: what it does instead, by kind.

    The undecidable is no contradiction: which of two methods drafts in every step; an engine that sometimes does not
    draft, as one sequence beyond an EAGLE head's length stops drafts for its whole batch; old versions.

    Examples
    --------
    >>> eagle = Speculation(Method.EAGLE3, DraftSchedule(3))
    >>> contradictions(eagle, EngineMetrics(speculates=False))
    {'no_speculation': 'its engine does not speculate'}
    """
    if said.method is Method.BASELINE:
        if not engine.speculates:
            return {}
        return {"speculation": f"its engine speculates, with k {_schedule(said, engine).k}"}
    if engine.speculates is False:
        return {"no_speculation": "its engine does not speculate"}
    if engine.speculates is None:
        return {}
    found = {}
    schedule = _schedule(said, engine)
    if schedule != said.schedule:
        found["k"] = f"its engine drafts with k {schedule.k}" + (
            " whatever the batch" if said.schedule.by_batch else ""
        )
    steps = engine.generation_tokens if engine.later_steps is None else engine.later_steps
    if not engine.drafts and steps >= _least_steps(said):
        found["no_drafts"] = "its engine drafts nothing"
    if said.method in SPARING - {Method.CUSTOM_CLASS} and _drafts_always(engine, schedule.k, steps):
        found["every_step"] = f"its engine drafts {schedule.k} tokens in each step, which {said.method} does not"
    return found


def observed(said: Speculation, kinds: Collection[str], engine: EngineMetrics) -> Speculation:
    """Return how an engine speculates, given the kinds of its contradictions to its declared speculation.

    A drafter of unknown method counts as a `custom_class`, which shares no learned values with others.
    """
    if not kinds:
        return said
    if "no_speculation" in kinds or "no_drafts" in kinds:
        return Speculation(Method.BASELINE, DraftSchedule(0))
    method = Method.CUSTOM_CLASS if "speculation" in kinds or "every_step" in kinds else said.method
    return Speculation(method, _schedule(said, engine))


def compare(backend: Backend, engine: EngineMetrics) -> bool:
    """Set how an engine contradicts the pool file and how it speculates; return whether this changed."""
    found = contradictions(backend.declared, engine)
    if backend.draft_depth:
        found.pop("no_drafts", None)  # all its requests may have asked for none
    is_new = found != backend.engine.contradictions
    if is_new:
        backend.observe(found, observed(backend.declared, found, engine))
    return is_new


def unlike_answers(backends: Sequence[Backend]) -> Iterator[str]:
    """Yield each reason why answers of a model's replicas differ, or are not the model's own."""
    if lossy := [each.name for each in backends if is_lossy(each.speculative_config)]:
        whose = "differ by replica" if len(lossy) < len(backends) else "are not the model's own"
        yield f"{', '.join(lossy)}: vLLM accepts drafts that the model would not write there, so answers {whose}."
    started = [each.flags for each in backends if each.flags is not None]
    for flag in _CHANGING:
        if len({flag_value(flags, flag) for flags in started}) > 1:
            yield f"its engines are started with unlike {flag}: answers differ by replica."
    if unlike := unlike_weights(backends):
        yield f"{unlike}."


def unlike_weights(backends: Sequence[Backend]) -> str:
    """Return a warning if a model's engines have loaded weights with different names; else ""."""
    roots = {each.engine.said.root for each in backends} - {""}
    if len({root.rpartition("/")[2].lower() for root in roots}) < 2:
        return ""
    loaded = " and ".join(map(printable, sorted(roots)[:3]))
    return f"its engines have loaded {loaded}: answers differ by replica unless these are the same weights"


class Unlike:
    """How each model's engines differ from one another, or from its name; logs what is new."""

    def __init__(self) -> None:
        self.contexts: set[str] = set()  # models whose engines take contexts of different lengths
        self._answers: dict[str, Sequence[str]] = {}  # by model: why they differ, as logged
        self._misnamed: set[str] = set()  # models that no engine serves, as logged

    def compare(self, members: Sequence[Backend]) -> None:
        """Compare the answers and the context lengths of a model's engines."""
        model = members[0].model
        unlike, before = list(unlike_answers(members)), self._answers.get(model, ())
        for what in unlike:
            if what not in before:
                logger.warning("%s: %s", model, what)
        self._answers[model] = unlike
        known = {each.engine.said.context_tokens for each in members} - {0}
        if len(known) < 2:
            self.contexts.discard(model)
        elif model not in self.contexts:
            self.contexts.add(model)
            what = f"{min(known):,} to {max(known):,} tokens"
            logger.warning("%s: its engines take contexts of %s; each request goes to those that take it", model, what)

    def compare_names(self, model: str, serves: Sequence[tuple[str, ...]]) -> None:
        """Compare a model's name with the names that its engines serve."""
        wrong = misnamed(model, serves)
        if wrong and model not in self._misnamed:
            logger.warning("%s: %s", model, wrong)
        (self._misnamed.add if wrong else self._misnamed.discard)(model)


def _schedule(said: Speculation, engine: EngineMetrics) -> DraftSchedule:
    """Return how many tokens an engine drafts: its number of positions, unless its drafts have other sizes."""
    schedule, positions = said.schedule, len(engine.accepted_per_position)
    if positions and positions != schedule.k:
        return DraftSchedule(positions)
    if engine.drafts < _LEAST_STEPS:
        return schedule if schedule.k else DraftSchedule(1)
    drafted, most = engine.draft_tokens / engine.drafts, max(schedule.by_batch[1:], default=schedule.k)
    is_variable = said.method in SPARING or schedule.by_batch or schedule.adaptive or positions
    if drafted > most + _NEAR or (drafted < most - 0.5 and not is_variable):
        return DraftSchedule(max(1, math.ceil(drafted - _NEAR)))
    return schedule


def _least_steps(said: Speculation) -> float:
    if said.method in SPARING:
        return _LEAST_STEPS_SPARING
    return math.inf if 0 in said.schedule.by_batch[1:] else _LEAST_STEPS


def _drafts_always(engine: EngineMetrics, k: int, steps: int) -> bool:
    drafts = engine.drafts
    return drafts >= _LEAST_DRAFTS and drafts >= _ALL * steps > 0 and engine.draft_tokens >= _ALL * k * drafts
