"""A fluid model of a pool in which every time is exactly as learned, for comparing choices offline.

An answer is a continuous flow of steps. All requests of a backend share its steps, whose time depends on the current
batch, and a new prompt delays all of them while it is computed. There is no queue, memory limit or prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from backends.backend import Candidate, EngineLoad
from backends.draft_schedule import DraftSchedule
from backends.drafter_limit import DrafterLimit
from backends.speculation import Method
from policies.features.request import RequestFeatures
from policies.learned.models.keys import Key
from policies.learned.models.prior import StepCost
from policies.learned.models.step_time import weighed
from policies.learned.predict import Predictor

Kind = tuple[Key, RequestFeatures]
"""A request with its bucket key."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request to be simulated."""

    features: RequestFeatures
    key: Key
    output_tokens: float  # length of its answer
    arrives_s: float = 0.0  # arrival time in seconds
    # Share of the answer that is left on arrival, 0 to 1; below 1 for a request that is already in flight.
    left: float = 1.0


@dataclass(slots=True)
class FluidBackend:
    """A backend of the fluid model; a `Candidate`."""

    name: str
    method: Method
    draft_schedule: DraftSchedule
    weight: float
    cost: StepCost
    drafter_limit: DrafterLimit | None = None
    in_flight: int = 0
    load: EngineLoad = field(default_factory=EngineLoad)
    now_s: float = 0.0
    _steps: float = 0.0
    _context: float = 0.0
    _stalled_s: float = 0.0
    _running: list[tuple[float, int, float]] = field(default_factory=list)

    @property
    def num_speculative_tokens(self) -> int:
        """Maximum tokens drafted per step; 0 for a baseline."""
        return self.draft_schedule.k

    def put(self, number: int, steps: float, context_tokens: float, prefill_s: float) -> None:
        """Start request `number`: so many steps of that mean context, after the seconds that its prompt takes."""
        heappush(self._running, (self._steps + steps, number, context_tokens))
        self._stalled_s += prefill_s
        self._context += context_tokens
        self.in_flight += 1

    def run(self, until_s: float) -> list[tuple[int, float]]:
        """Advance the time to `until_s`, and return the requests that ended and when."""
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
"""Function that returns the index of the backend for a job, given the time in seconds."""

End = Callable[[int], None]
"""Function that is called with the number of a job when it has ended."""


def fluid_pool(predictor: Predictor, candidates: Sequence[Candidate]) -> list[FluidBackend]:
    """Return an empty pool of backends with the learned costs."""
    return [
        FluidBackend(
            candidate.name,
            candidate.method,
            candidate.draft_schedule,
            candidate.weight,
            predictor.of(candidate).cost,
            candidate.drafter_limit,
        )
        for candidate in candidates
    ]


def play(jobs: Sequence[Job], predictor: Predictor, pool: Sequence[FluidBackend], choose: Choose, end: End) -> float:
    """Send jobs through an empty pool, and return the mean seconds to finish."""
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
        context_tokens = features.prompt_tokens + job.output_tokens / 2
        per_step = predictor.tokens_per_step(backend.name, job.key, context_tokens)
        prompt = weighed(features.prompt_tokens, 0.0, predictor.attention) if job.left == 1.0 else 0.0
        steps = max(1.0, job.left * job.output_tokens / per_step)
        backend.put(number, steps, context_tokens, backend.cost.per_prompt_token_s * prompt)
    run(_END_S)
    return total_s / max(1, counted)


_END_S = 1e12
