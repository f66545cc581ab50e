"""Synthetic traffic: requests like the observed ones, drawn from their buckets, at any load."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from random import Random

from backends.backend import Candidate
from policies.distill.fluid import Job, Kind, fluid_pool
from policies.features.request import Endpoint, RequestFeatures
from policies.learned.models import keys
from policies.learned.models.keys import Key
from policies.learned.models.length import NOISE
from policies.learned.predict import Predictor

KINDS = 960
"""Number of requests drawn from the buckets; the requests of a run are drawn from these."""

_MIN_JOBS = 480
_RATE_SAMPLE = 160
"""Number of requests from which the arrival rate is estimated."""


class LikelyTraffic:
    """A generator of requests like the observed ones."""

    def __init__(self, predictor: Predictor, counts: Mapping[Key, float], seed: int) -> None:
        self._predictor = predictor  # source of answer lengths and costs
        self._rng = rng = Random(seed)
        keys = list(counts)
        rng.shuffle(keys)
        cumulated = list(accumulate(counts[key] for key in keys))
        # Systematic sampling: each key is drawn in proportion to its count, with less variance than independent draws.
        start = rng.random()
        drawn = [keys[bisect_right(cumulated, (start + index) / KINDS * cumulated[-1])] for index in range(KINDS)]
        self.kinds = [(key, representative(key, rng)) for key in drawn]
        effects = predictor.fitted.length.effects
        self._noise = NOISE if effects is None else effects.noise

    def jobs(self, candidates: Sequence[Candidate], level: float) -> list[Job]:
        """Return requests with Poisson arrivals, at the rate that a pool with `level` requests per backend serves.

        The first requests fill the pool to that level; they are in flight at the start.
        """
        rng = self._rng
        rate = self._rate(candidates, level, rng.choices(self.kinds, k=_RATE_SAMPLE))
        initial = round(level * len(candidates))
        jobs, at_s = [], 0.0
        for number in range(initial + max(_MIN_JOBS, 3 * initial)):
            key, features = rng.choice(self.kinds)
            mean = self._predictor.fitted.length.tokens(features, key)
            tokens = mean * math.exp(self._noise * rng.gauss(0.0, 1.0) - self._noise**2 / 2)
            tokens = min(max(1.0, tokens), features.max_tokens or math.inf)
            if number >= initial:
                at_s += rng.expovariate(rate)
            jobs.append(Job(features, key, tokens, at_s, 1.0 if number >= initial else rng.uniform(0.01, 0.99)))
        return jobs

    def _rate(self, candidates: Sequence[Candidate], level: float, kinds: Sequence[Kind]) -> float:
        """Return the requests per second that the pool serves with `level` requests on each backend."""
        rate = 0.0
        for backend in fluid_pool(self._predictor, candidates):
            work_s = 0.0
            backend.in_flight = round(level)
            cost = backend.cost
            for key, features in kinds:
                prediction = self._predictor.predict(features, key, [backend])[0]
                each_s = cost.per_request_s + cost.per_context_token_s * prediction.context_tokens
                prefill_s = level * cost.per_prompt_token_s * prediction.weighed_tokens
                work_s += prediction.steps * (cost.base_s + level * each_s) + prefill_s
            rate += level * len(kinds) / work_s
        return rate


def representative(key: Key, rng: Random) -> RequestFeatures:
    """Return a request that has the given key."""
    shape, limit = key[keys.SHAPE], key[keys.LIMIT]
    return RequestFeatures(
        "",
        Endpoint.CHAT,
        temperature=_within((0.0, *keys.TEMPERATURES, 1.5), int(key[keys.TEMPERATURE]), rng),
        overlap=_within((0.0, *keys.OVERLAPS, 0.9), int(key[keys.OVERLAP]), rng),
        code_share=0.6 if shape == "code" else 0.0,
        prompt_tokens=int(_within(keys.PROMPT_BOUNDS, int(key[keys.PROMPT]), rng)),
        max_tokens=int(_within((8, *keys.LIMITS, 8192), int(limit), rng)) if limit else None,
        template=key[keys.TEMPLATE],
        turns=1 if key[keys.TURNS].startswith("first") else 3,
        thinking={"thinks": True, "plain": False}.get(keys.thinking_of(key)),
        structured=shape == "structured",
        restricted=shape == keys.RESTRICTED,
        workload=key[keys.WORKLOAD],
    )


def _within(bounds: Sequence[float], index: int, rng: Random) -> float:
    return rng.uniform(bounds[index], bounds[index + 1] * (1 - 1e-9))
