"""Prediction of the time that a request takes on each backend, and of the delay that it causes to others.

Time per token is time per step over tokens per step. Time per step depends on the backend and its load; tokens per step
on the request and the method. They are learned separately, so that predictions hold at loads never observed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from backends.backend import Candidate
from backends.draft_schedule import DraftSchedule, effective_k
from policies.arm import arm_of
from policies.features.request import RequestFeatures
from policies.learned.models.acceptance import AcceptanceModel
from policies.learned.models.backend_model import BackendModel, FittedModels, Prediction
from policies.learned.models.depth import Depth
from policies.learned.models.keys import Key
from policies.learned.models.prefix_memory import PrefixMemory
from policies.learned.models.prior import (
    DEFAULT_CALIBRATION,
    adaptive_schedule,
    attention_share,
    context_bin,
    expected_step,
)
from policies.learned.models.step_time import weighed
from policies.learned.models.undrafted import steps_of
from policies.load import LoadMeter

_Acceptance = tuple[BackendModel, float, list[float], float]
"""A backend, the tokens per step of one request key there, those by level of its depth, and how many were observed."""


class Predictor:
    """Evaluates the fitted models for each request; it never blocks, and fits nothing itself."""

    def __init__(self, meter: LoadMeter, calibration: str = DEFAULT_CALIBRATION) -> None:
        self.meter = meter  # counter of the requests on a backend
        self.calibration = calibration  # name of the calibration that describes backends without observations
        self.attention = attention_share(calibration)
        self.prefixes = PrefixMemory()
        self.backend_models: dict[str, BackendModel] = {}  # model of each backend seen so far, by name
        self._fitted = FittedModels(AcceptanceModel(calibration=calibration))
        self._acceptance: dict[Key, dict[int, dict[str, _Acceptance]]] = {}  # by key, bin of the context and backend
        self.slow: set[str] = set()  # names of the backends whose slowness is above 1
        # Factors by which the tokens per step that answers of a backend show are multiplied, by name.
        self.corrections: dict[str, float] = {}
        self.prefill_s = 0.0  # mean seconds of the prompts that were sent of late
        self.now_s = 0.0  # time of the next prediction, set by the caller

    @property
    def fitted(self) -> FittedModels:
        """The fitted models in use."""
        return self._fitted

    def learn(self, fitted: FittedModels) -> None:
        """Replace the fitted models."""
        self._fitted = fitted
        self._acceptance = {}
        for model in self.backend_models.values():
            model.learn(fitted)

    def take_over(self, previous: Predictor) -> None:
        """Continue with the prefix caches and the backlogs of another predictor, and with its fit until the next one.

        With another calibration there is nothing to continue with: it changes what is expected of each backend.
        """
        if previous.calibration == self.calibration:
            self.prefixes, self.slow = previous.prefixes, previous.slow
            self.corrections = previous.corrections
            self.backend_models, self._fitted = previous.backend_models, previous._fitted

    def forget(self, backend: str) -> None:
        """Drop the model of a backend that has left."""
        self._acceptance = {}
        self.corrections.pop(backend, None)
        model = self.backend_models.pop(backend, None)
        if model is not None:
            self.prefixes.remove_backend(model.prefixes)
            self.slow.discard(backend)

    def set_slowness(self, backend: str, slowness: float) -> None:
        """Set the backend's slowness: observed over fitted step time, at least 1."""
        self.backend_models[backend].slowness = slowness
        if slowness > 1.0:
            self.slow.add(backend)
        else:
            self.slow.discard(backend)

    def set_silent(self, backend: str, silent: bool) -> None:
        """Set whether the drafter of a backend is silent."""
        model = self.backend_models.get(backend)
        if model is not None and model.silent != silent:
            model.silent = silent
            self._acceptance = {}

    def of(self, candidate: Candidate) -> BackendModel:
        """Return the model of a backend; a new backend gets one from the calibration."""
        model = self.backend_models.get(candidate.name)
        if model is None:
            k = effective_k(candidate.method, candidate.num_speculative_tokens)
            prior = expected_step(self.calibration, candidate.method, k)
            schedule = candidate.draft_schedule
            if schedule.adaptive:
                schedule = adaptive_schedule(self.calibration, candidate.method, schedule)
            depth = depth_of(schedule)
            costs = [(k, level) if schedule.adaptive else (level, None) for level in depth.levels] if depth else []
            priors = [expected_step(self.calibration, candidate.method, *each) for each in costs]
            prefixes = self.prefixes.add_backend()
            model = BackendModel(candidate.name, arm_of(candidate), prior, self._fitted, prefixes, depth, priors)
            self.backend_models[candidate.name] = model
        return model

    def tokens_per_step(self, backend: str, key: Key, context_tokens: float = 0.0) -> float:
        """Return the predicted tokens per step of a request key, at its maximum k, on a backend that has a model."""
        by_backend = self._acceptance_of(key, context_tokens)
        acceptance = by_backend.get(backend)
        if acceptance is None:
            acceptance = by_backend[backend] = self._evaluate(self.backend_models[backend], key, context_tokens)
        return acceptance[1]

    def _evaluate(self, model: BackendModel, key: Key, context_tokens: float) -> _Acceptance:
        per_step, observations = model.acceptance(key, context_tokens)
        return model, per_step, model.acceptance_by_level(key, context_tokens), observations

    def _acceptance_of(self, key: Key, context_tokens: float) -> dict[str, _Acceptance]:
        """Return the cached predictions for a key at a mean context, by backend."""
        by_context = self._acceptance.get(key)
        if by_context is None:
            if len(self._acceptance) >= _MAX_CACHED_KEYS:
                self._acceptance.clear()  # recent keys soon come back, old ones need not
            by_context = self._acceptance[key] = {}
        context = context_bin(context_tokens)
        by_backend = by_context.get(context)
        if by_backend is None:
            by_backend = by_context[context] = {}
        return by_backend

    def predict(self, request: RequestFeatures, key: Key, candidates: Sequence[Candidate]) -> list[Prediction]:
        """Return the prediction for each candidate, without side effects.

        The request and those already on the backend delay each other for the steps that they share. A request of S
        steps shares `S R / (S + R)` steps with each request that has R steps left on average: about S if R is much
        larger, about R if it is much smaller.
        """
        sequences = request.n
        tokens, prompt_tokens = self._fitted.length.tokens(request, key) / sequences, float(request.prompt_tokens)
        context = prompt_tokens + tokens / 2
        holders = self.prefixes.holders(request)
        by_backend = self._acceptance_of(key, context)
        oldest_s = self.meter.oldest_s()
        stretch, meanwhile_per_s = _meanwhile(request.qps / len(candidates), self.prefill_s)
        predictions = []
        for candidate in candidates:
            name = candidate.name
            acceptance = by_backend.get(name)
            if acceptance is None:
                acceptance = by_backend[name] = self._evaluate(self.of(candidate), key, context)
            model, per_step, by_level, observations = acceptance
            if (load := candidate.load) is not model.load:  # a new report is a new object
                model.read(load, candidate.drafter_limit)
            requests = candidate.in_flight
            if model.reported_s >= oldest_s:
                requests += model.others
            backlog, slowness = model.backlog, model.slowness
            if model.depth is not None:
                per_step = model.meet(requests - model.waiting + sequences, by_level)
            undrafted, room = model.reach.expected(request, tokens)
            steps = steps_of(tokens, undrafted, backlog.undrafted, per_step)
            own_step_s = slowness * sequences * (model.per_request_s + model.per_context_token_s * context)
            sent = backlog.sent if requests else 0
            if sent:
                steps_left = backlog.steps / sent
                context_s = model.per_context_token_s * backlog.context_tokens / sent
                other_step_s = slowness * (model.per_request_s + context_s)
            else:
                steps_left, other_step_s = steps, own_step_s
            shared_steps = requests * steps * steps_left / (steps + steps_left)
            cached = model.prefixes.cached_tokens(request, holders) if holders else 0.0
            prompt = max(1.0, prompt_tokens - cached) if cached else prompt_tokens
            work = weighed(prompt, prompt_tokens - prompt, self.attention)
            prefill_s = slowness * model.prompt_time.token_s(model.per_prompt_token_s) * work
            wait_s = backlog.prefill_left_s(self.now_s) if requests else 0.0
            delayed = requests + meanwhile_per_s * (wait_s + prefill_s)
            if evicted := model.prefixes.recomputed(prompt, self.now_s):
                delayed += evicted * _delayed_later(candidates, meanwhile_per_s * prefill_s)
            alone_s = slowness * model.base_s + own_step_s
            step_s = alone_s + requests * other_step_s
            adds_s = own_step_s  # to each step of the others
            if sent and model.depth is not None:
                adds_s = step_s - slowness * model.without_s(requests, per_step, by_level)
            ttft_s = model.joins(requests) * step_s + wait_s + prefill_s
            if model.waiting:
                # A waiting request is admitted when a running one ends; each of those has `steps_left` on average.
                ttft_s += model.waiting / max(1, requests - model.waiting) * steps_left * step_s
            predictions.append(
                Prediction(
                    ttft_s,
                    stretch * (steps * alone_s + shared_steps * other_step_s),
                    stretch * shared_steps * adds_s
                    + delayed * prefill_s
                    + step_s * model.reach.taken(undrafted, backlog.undrafted, requests, per_step),
                    step_s,
                    steps,
                    tokens / steps if undrafted or backlog.undrafted else per_step,
                    tokens,
                    context,
                    prompt,
                    requests,
                    observations,
                    prefill_s,
                    work,
                    undrafted,
                    room,
                )
            )
        return predictions


def _meanwhile(arrivals_per_s: float, prefill_s: float) -> tuple[float, float]:
    """Return how much longer steps take for the prompts that come meanwhile, and the requests that a second delays.

    Those come until all prompts are computed; what their own prompts take prolongs that, as in any queue.
    """
    stretch = 1.0 / (1.0 - min(_MOST_BUSY, arrivals_per_s * prefill_s))
    return stretch, arrivals_per_s * stretch


def _delayed_later(candidates: Sequence[Candidate], arriving: float) -> float:
    """Return how many requests wait for what is computed again on some backend."""
    requests = sum([one.in_flight for one in candidates]) / len(candidates)
    return min(1.0, requests / _CROWDED) * (1.0 + requests + arriving)


def depth_of(schedule: DraftSchedule) -> Depth | None:
    """Return the depth by batch size; None if it is always the same."""
    return Depth(schedule) if len({*schedule.by_batch[1:]}) > 1 else None


_MOST_BUSY: Final = 0.8
"""Share of a backend's time for prompts above which more would not change what one costs."""
_CROWDED: Final = 6.0
"""Requests in flight per backend from which on what is evicted costs all that it takes later. With fewer it is computed
while the engine would have little else to do, and a conversation gains more from a fast replica than others lose."""
_MAX_CACHED_KEYS: Final = 10_000
