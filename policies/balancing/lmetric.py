"""The `lmetric` policy."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from random import Random

from backends.backend import Candidate, EngineChange
from policies.decision import Outcome
from policies.features.request import RequestFeatures
from policies.learned.prefix_memory import BackendPrefixes, PrefixMemory
from policies.load import per_weight
from policies.load_policy import LoadPolicy, LoadSettings
from policies.policy import Assessment, Decision, register
from policies.roles import Informed, Learner, Maintained


@register
class LMetric(LoadPolicy, Learner, Maintained, Informed):
    """A policy that picks the least product of prompt tokens to compute and batch size, the score of LMetric [1]_.

    Prompt tokens to compute are those not expected in the backend's prefix cache, at least one; the batch includes the
    new request, so that an idle backend is not free. Ties are broken at random. Prompt tokens that wait in an engine
    do not count, because no engine reports them.

    References
    ----------
    .. [1] Zhang et al., "Simple is Better: Multiplication May Be All You Need for LLM Request Scheduling", OSDI 2026,
       arXiv 2603.15202.
    """

    name = "lmetric"
    text_features = frozenset({"prefix"})

    def __init__(self, settings: LoadSettings) -> None:
        super().__init__(settings)
        self._memory = PrefixMemory()
        self._prefixes: dict[str, BackendPrefixes] = {}
        self._clock: Callable[[], float] = time.time

    def set_clock(self, clock: Callable[[], float]) -> None:
        """Replace the clock, which returns seconds."""
        self._clock = clock

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate], rng: Random | None = None) -> Decision:
        """Choose the candidate with the least score, and remember that it has the prompt."""
        decision, prefixes = self._decide(request, candidates, rng or self.rng)
        prefixes.remember(request.prefix, request.prefix_tokens, self._clock())
        return decision

    def preview(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Return the decision that `choose` would make now."""
        return self._decide(request, candidates, copy.copy(self.rng))[0]

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Score each candidate by the product."""
        return [
            Assessment(candidate.name, score, f"{new:.0f} prompt tokens to compute, {count} in flight")
            for candidate, (score, new, count) in zip(candidates, self._scores(request, candidates), strict=True)
        ]

    def observe(self, outcome: Outcome) -> None:
        """Adjust the trust in expected cached tokens by the engine's report."""
        prefixes = self._prefixes.get(outcome.decision.backend)
        if prefixes is not None and outcome.cached_tokens is not None:
            prefixes.learn(outcome.decision.cached_tokens, outcome.cached_tokens)

    def forget(self, backend: str) -> None:
        """Drop the prefixes of a backend that has left."""
        prefixes = self._prefixes.pop(backend, None)
        if prefixes is not None:
            self._memory.remove_backend(prefixes)

    def engine_changed(self, backend: str, change: EngineChange) -> None:
        """Forget the prompts that an engine had cached before it restarted, slept or got other weights."""
        if (prefixes := self._prefixes.get(backend)) is not None:
            prefixes.clear()

    def sent_elsewhere(self, backend: str, prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        """Remember that a backend has a prompt sent by another gateway."""
        if (known := self._prefixes.get(backend)) is not None:
            known.remember(prefixes, lengths, self._clock())

    def evicted(self, backend: str, unused_s: float | None, is_full: bool) -> None:
        """Forget prefixes unused for this many seconds, by the engine's events; None if it sends none."""
        if (known := self._prefixes.get(backend)) is not None:
            known.evicted(None if unused_s is None else self._clock() - unused_s, is_full)

    def _decide(
        self, request: RequestFeatures, candidates: Sequence[Candidate], rng: Random
    ) -> tuple[Decision, BackendPrefixes]:
        scores = self._scores(request, candidates)
        least = min(score for score, _, _ in scores)
        best = [index for index, (score, _, _) in enumerate(scores) if score <= least]
        index = best[rng.randrange(len(best))] if len(best) > 1 else best[0]
        chosen, (_, new, _) = candidates[index].name, scores[index]
        prefixes, cached = self._prefixes[chosen], int(request.prompt_tokens - new)
        decision = Decision(
            chosen, self.name, "least_product", 1.0 / len(best), cached_tokens=cached, cached_by=prefixes.goes_by
        )
        return decision, prefixes

    def _scores(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[tuple[float, float, int]]:
        """Return score, prompt tokens to compute and requests of each candidate."""
        holders = self._memory.holders(request)
        scores = []
        for candidate, count in zip(candidates, self.meter.counts(candidates), strict=True):
            prefixes = self._prefixes.get(candidate.name)
            if prefixes is None:
                prefixes = self._prefixes[candidate.name] = self._memory.add_backend()
            prefixes.resize(candidate.load.kv_tokens)
            new = max(1.0, request.prompt_tokens - prefixes.cached_tokens(request, holders))
            scores.append((new * per_weight(candidate, count + 1), new, count))
        return scores
