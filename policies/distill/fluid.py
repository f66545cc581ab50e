"""A pool in which everything takes exactly what was learned: to weigh choices against each other before making them.

Answers are a flow of steps: all requests of a backend share its steps, whose time depends on the batch of that moment,
and a new prompt holds up everybody for as long as it takes to compute. No queue, no memory, no prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from backends.backend import Candidate, EngineLoad
from backends.speculation import Method
from policies.features.request import RequestFeatures
from policies.learned.models.buckets import Key
from policies.learned.models.prior import StepCost
from policies.learned.predict import Predictor

Kind = tuple[Key, RequestFeatures]
"""A request, and the key of what is known of those like it."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request with the length that its answer will have; `left` of it is still to come when it arrives, 0 to 1."""

    features: RequestFeatures
    key: Key
    output_tokens: float
    arrives_s: float = 0.0
    left: float = 1.0


@dataclass(slots=True)
class FluidBackend:
    """One backend of the pool; a `Candidate`."""

    name: str
    method: Method
    num_speculative_tokens: int
    weight: float
    cost: StepCost
    in_flight: int = 0
    load: EngineLoad = field(default_factory=EngineLoad)
    now_s: float = 0.0
    _steps: float = 0.0
    _context: float = 0.0
    _stalled_s: float = 0.0
    _running: list[tuple[float, int, float]] = field(default_factory=list)

    def put(self, number: int, steps: float, context_tokens: float, prefill_s: float) -> None:
        """Begin a request."""
        heappush(self._running, (self._steps + steps, number, context_tokens))
        self._stalled_s += prefill_s
        self._context += context_tokens
        self.in_flight += 1

    def run(self, until_s: float) -> list[tuple[int, float]]:
        """Go on to a moment, and return which requests ended, and when."""
        ended = []
        running, cost = self._running, self.cost
        while running:
            stalled_s = min(self._stalled_s, until_s - self.now_s)
            self._stalled_s -= stalled_s
            self.now_s += stalled_s
            step_s = cost.base_s + cost.per_request_s * len(running) + cost.per_context_token_s * self._context
            steps = running[0][0] - self._steps
            if self._stalled_s > 0 or self.now_s + steps * step_s > until_s:
                self._steps += (until_s - self.now_s) / step_s
                break
            self.now_s += steps * step_s
            self._steps, number, context_tokens = heappop(running)
            self._context -= context_tokens
            self.in_flight -= 1
            ended.append((number, self.now_s))
        if until_s < _END_S:
            self.now_s = until_s
        return ended


Choose = Callable[[Job, Sequence[FluidBackend], float], int]
"""Returns the place of the backend that a job is sent to, at a moment in seconds."""

End = Callable[[int], None]
"""Is told the number of a job that has ended."""


def fluid_pool(predictor: Predictor, candidates: Sequence[Candidate]) -> list[FluidBackend]:
    """Return an empty pool of backends that are as they were learned to be."""
    return [
        FluidBackend(one.name, one.method, one.num_speculative_tokens, one.weight, predictor.of(one).cost)
        for one in candidates
    ]


def play(jobs: Sequence[Job], predictor: Predictor, pool: Sequence[FluidBackend], choose: Choose, end: End) -> float:
    """Send jobs through an empty pool, and return the mean seconds to finish of those that arrive whole.

    Parameters
    ----------
    jobs
        In order of arrival; those with `left` below 1 fill the pool at the start and are not counted.
    predictor
        Says what a token takes.
    pool
        Of `fluid_pool`; it is empty again at the end.
    """
    total_s, counted = 0.0, 0

    def run(until_s: float) -> None:
        nonlocal total_s, counted
        for backend in pool:
            for number, at_s in backend.run(until_s):
                end(number)
                job = jobs[number]
                if job.left == 1.0:
                    total_s += at_s - job.arrives_s
                    counted += 1

    for number, job in enumerate(jobs):
        run(job.arrives_s)
        backend = pool[choose(job, pool, job.arrives_s)]
        features = job.features
        per_step = predictor.tokens_per_step(backend.name, job.key)
        prefill_s = backend.cost.per_prompt_token_s * features.prompt_tokens if job.left == 1.0 else 0.0
        steps = max(1.0, job.left * job.output_tokens / per_step)
        backend.put(number, steps, features.prompt_tokens + job.output_tokens / 2, prefill_s)
    run(_END_S)
    return total_s / max(1, counted)


_END_S = 1e12
