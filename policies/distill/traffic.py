"""Requests like those that were seen: drawn from the cells of experience, to be sent at a load of one's choice."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from random import Random
from statistics import median

from backends.backend import Candidate
from policies.distill.fluid import Job, Kind, fluid_pool
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.models.buckets import (
    LIMIT,
    LIMITS,
    OVERLAP,
    OVERLAPS,
    PROMPT,
    PROMPT_TOKENS,
    SHAPE,
    TEMPERATURE,
    TEMPERATURES,
    TEMPLATE,
    TURNS,
    WORKLOAD,
    Key,
)
from policies.learned.models.length import NOISE
from policies.learned.predict import Predictor

KINDS = 960
"""Requests drawn from the cells; those of a run are drawn from these."""

_LEAST_JOBS = 240
_OF_RATE = 160
"""Requests that are asked what they take, for the rate at which they are to arrive."""


class Mix(StrEnum):
    """Which requests there are many of: as were seen, or more of those whose answers are long, or short.

    How much a request there costs the next one depends on how long it stays. Rules count requests, so they fit the mix
    that they were made from; made from several, they stand a shift.
    """

    SEEN = "seen"
    LONG = "long"
    SHORT = "short"


_TIMES_AS_MANY = 5.0


class LikelyTraffic:
    """Draws requests as they may come again.

    Parameters
    ----------
    predictor
        Says how long answers are, and what they take.
    counts
        How many requests were seen of each key.
    """

    def __init__(self, predictor: Predictor, counts: Mapping[Key, float], seed: int) -> None:
        self._predictor = predictor
        self._rng = rng = Random(seed)
        keys = list(counts)
        rng.shuffle(keys)
        until = list(accumulate(counts[key] for key in keys))
        # At even distances, so that each key comes as often as it should, and not as chance has it.
        begin = rng.random()
        drawn = [keys[bisect_right(until, (begin + place) / KINDS * until[-1])] for place in range(KINDS)]
        self.kinds = [(key, representative(key, rng)) for key in drawn]
        effects = predictor.fitted.length.effects
        self._noise = NOISE if effects is None else effects.noise
        tokens = [predictor.fitted.length.tokens(features, key) for key, features in self.kinds]
        middle = median(tokens)
        self._until = {Mix.SEEN: [float(place + 1) for place in range(KINDS)]}
        for mix, many in ((Mix.LONG, [one > middle for one in tokens]), (Mix.SHORT, [one <= middle for one in tokens])):
            self._until[mix] = list(accumulate(_TIMES_AS_MANY if one else 1.0 for one in many))

    def jobs(self, candidates: Sequence[Candidate], level: float, mix: Mix = Mix.SEEN) -> list[Job]:
        """Return requests that arrive at random, as fast as a pool with `level` on each backend gets them done.

        The first fill the pool to that level; they are under way already.
        """
        rng, until = self._rng, self._until[mix]
        rate = self._rate(candidates, level, [self._drawn(until) for _ in range(_OF_RATE)])
        there = round(level * len(candidates))
        jobs, at_s = [], 0.0
        for number in range(there + max(_LEAST_JOBS, 3 * there)):
            key, features = self._drawn(until)
            mean = self._predictor.fitted.length.tokens(features, key)
            tokens = mean * math.exp(self._noise * rng.gauss(0.0, 1.0) - self._noise**2 / 2)
            tokens = min(max(1.0, tokens), features.max_tokens or math.inf)
            if number >= there:
                at_s += rng.expovariate(rate)
            jobs.append(Job(features, key, tokens, at_s, 1.0 if number >= there else rng.uniform(0.01, 0.99)))
        return jobs

    def _drawn(self, until: Sequence[float]) -> Kind:
        return self.kinds[bisect_right(until, self._rng.random() * until[-1])]

    def _rate(self, candidates: Sequence[Candidate], level: float, kinds: Sequence[Kind]) -> float:
        """Return the requests a second that are done while each backend has `level` of them."""
        rate = 0.0
        for backend in fluid_pool(self._predictor, candidates):
            work_s = 0.0
            backend.in_flight = round(level)
            cost = backend.cost
            for key, features in kinds:
                one = self._predictor.predict(features, key, [backend], 0.0)[0]
                each_s = cost.per_request_s + cost.per_context_token_s * one.context_tokens
                work_s += (
                    one.steps * (cost.base_s + level * each_s) + level * cost.per_prompt_token_s * one.prompt_tokens
                )
            rate += level * len(kinds) / work_s
        return rate


def representative(key: Key, rng: Random) -> RequestFeatures:
    """Return a request that has the given key."""
    shape, limit = key[SHAPE], key[LIMIT]
    return RequestFeatures(
        "",
        Endpoint.CHAT,
        temperature=_within((0.0, *TEMPERATURES, 1.5), int(key[TEMPERATURE]), rng),
        overlap=_within((0.0, *OVERLAPS, 0.9), int(key[OVERLAP]), rng),
        code_share=0.6 if shape == "code" else 0.0,
        prompt_tokens=int(_within((8, *PROMPT_TOKENS, 65536), int(key[PROMPT]), rng)),
        max_tokens=int(_within((8, *LIMITS, 8192), int(limit), rng)) if limit else None,
        template=key[TEMPLATE],
        turns=1 if key[TURNS] == "first" else 3,
        structured=shape == "structured",
        workload=key[WORKLOAD],
    )


def _within(bounds: Sequence[float], place: int, rng: Random) -> float:
    return rng.uniform(bounds[place], bounds[place + 1] * (1 - 1e-9))
