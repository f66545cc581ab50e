"""`learned` with one part switched off, for `benchmarks.routing.ablation`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from backends.backend import Candidate
from backends.draft_schedule import DraftSchedule
from backends.simulator.engine.replica import Replica
from policies.decision import Decision
from policies.features.request import RequestFeatures
from policies.guarded.outlier_ejection import OutlierEjection
from policies.guarded.silent_drafters import Learned as Observation
from policies.guarded.silent_drafters import SilentDrafters
from policies.learned.models.acceptance import ACCEPTANCE, AcceptanceModel
from policies.learned.models.backend_model import BackendModel, FittedModels
from policies.learned.models.buckets import OVERLAP, PROMPT, SHAPE, TEMPERATURE, TEMPLATE, TURNS, Key
from policies.learned.models.length import LengthModel
from policies.learned.models.prefix_memory import PrefixMemory
from policies.learned.models.prior import ExpectedDepth
from policies.learned.models.prompt_time import PromptTime
from policies.learned.models.templates import Templates
from policies.learned.policy import Learned, LearnedSettings

Make = Callable[[int], Learned]
"""Makes a policy from its seed."""

FLAT = 2.0
"""Tokens per step of every drafter where the prior is flat."""


def plain(seed: int, **settings: Any) -> Learned:
    """Return `learned`, with some settings."""
    return Learned(LearnedSettings.model_validate({"seed": seed, **settings}))


class Flat(AcceptanceModel):
    """Expects the same of all methods, kinds of work and temperatures, as long as nothing is observed."""

    def depths(self, arm: str, workload: str, temperature_bin: str) -> tuple[ExpectedDepth, ...]:
        """Return the calibration's depths, with other tokens per step at the last."""
        *lower, last = super().depths(arm, "chat", "0")
        return (*lower, last if not lower else last._replace(log_tokens=math.log(FLAT)))


class Insensitive(AcceptanceModel):
    """Takes what an answer has beyond expectation as the same at every k."""

    def depths(self, arm: str, workload: str, temperature_bin: str) -> tuple[ExpectedDepth, ...]:
        """Return the calibration's depths, with a sensitivity of one wherever anything is drafted."""
        first, *others = super().depths(arm, workload, temperature_bin)
        return (first, *(one._replace(sensitivity=1.0) for one in others))


class Blind(Templates):
    """Keys without some of the features."""

    def __init__(self, blank: Sequence[int]) -> None:
        super().__init__()
        self._blank = blank

    def key(self, request: RequestFeatures, *, counts: bool = True) -> Key:
        """Return the bucket key, in which some features are as those of any request."""
        key = list(super().key(request, counts=counts))
        for index in self._blank:
            key[index] = _BLANK[index]
        return tuple(key)


class Steady(OutlierEjection):
    """Finds no backend slow and ejects none."""

    def observe(self, *_: Any) -> float:
        """Return that the backend is as fast as predicted."""
        return 1.0


class Unwatched(SilentDrafters):
    """No test for silence: everything is learned."""

    def observe(
        self,
        backend: str,
        arm: str,
        expected: float | None,
        observed: float,
        now_s: float,
        learned: Observation | None = None,
    ) -> Sequence[Observation]:
        """See `SilentDrafters.observe`."""
        return () if learned is None else (learned,)


class NoPrefixes(PrefixMemory):
    """Expects no prefix in any cache."""

    def holders(self, request: RequestFeatures) -> list[int]:
        """Return that no backend holds anything."""
        return []


class Unlearned(PromptTime):
    """Learns no time of prompts."""

    def learn(self, seconds: float, tokens: float) -> None:
        """Ignore the time."""


class Unaware(Learned):
    """`learned` that takes the k of every replica as fixed."""

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose as if no candidate had a schedule."""
        for candidate in candidates:
            assert isinstance(candidate, Replica)
            candidate.draft_schedule = DraftSchedule(candidate.num_speculative_tokens)
        return super().choose(request, candidates)


def refitted(policy: Learned, change: Callable[[Learned, FittedModels], FittedModels]) -> Learned:
    """Return the policy with each of its fits changed, also what it has before the first."""
    fitted = policy.fitted
    policy.fitted = lambda *given: change(policy, fitted(*given))  # type: ignore[method-assign]
    policy.predictor.learn(change(policy, policy.predictor.fitted))
    return policy


def with_acceptance(seed: int, kind: type[AcceptanceModel]) -> Learned:
    """Return `learned` with another model of acceptance."""

    def change(policy: Learned, fitted: FittedModels) -> FittedModels:
        return replace(fitted, acceptance=kind.fit(policy.statistics.buckets(ACCEPTANCE), policy.settings.calibration))

    return refitted(plain(seed), change)


def without_length(seed: int) -> Learned:
    """Return `learned` that expects the same length of every answer."""
    return refitted(plain(seed), lambda _, fitted: replace(fitted, length=LengthModel()))


def without_step_fit(seed: int) -> Learned:
    """Return `learned` with the calibration's step times; one factor for the whole pool would change no choice."""
    return refitted(plain(seed), lambda _, fitted: replace(fitted, steps={}, levels={}))


def blind(seed: int, *blank: int) -> Learned:
    """Return `learned` whose keys lack some features."""
    policy = plain(seed)
    policy.templates = Blind(blank)
    policy._assemble()
    return policy


def unfitted(seed: int) -> Learned:
    """Return `learned` that never fits its models."""
    policy = plain(seed)
    policy.maintenance = lambda: None  # type: ignore[method-assign]
    return policy


def steady(seed: int) -> Learned:
    """Return `learned` without outlier ejection and slowness."""
    policy = plain(seed)
    policy.outlier_ejection = Steady()
    policy._assemble()
    return policy


def unwatched(seed: int) -> Learned:
    """Return `learned` without the test for silent drafters."""
    policy = plain(seed)
    policy.drafters = Unwatched()
    policy._assemble()
    return policy


def without_prefixes(seed: int) -> Learned:
    """Return `learned` without the memory of prefixes."""
    policy = plain(seed)
    policy.predictor.prefixes = NoPrefixes()
    return policy


def of_backends(seed: int, change: Callable[[BackendModel], object]) -> Learned:
    """Return `learned` with each of its models of backends changed."""
    policy = plain(seed)
    of = policy.predictor.of

    def changed(candidate: Candidate) -> BackendModel:
        model = of(candidate)
        change(model)
        return model

    policy.predictor.of = changed  # type: ignore[method-assign]
    return policy


PARTS: dict[str, Make] = {
    "exploration": lambda seed: plain(seed, exploration={"share": 0}),
    "control group": lambda seed: plain(seed, guardrail={"share": 0}),
    "length model": without_length,
    "prior of acceptance": lambda seed: with_acceptance(seed, Flat),
    "shadow drafting": lambda seed: plain(seed, shadow_drafting={"sample": 0}),
    "step fit": without_step_fit,
    "templates": lambda seed: blind(seed, TEMPLATE),
    "overlap": lambda seed: blind(seed, OVERLAP),
    "length of the prompt": lambda seed: blind(seed, PROMPT),
    "shape and turns": lambda seed: blind(seed, SHAPE, TURNS),
    "temperature": lambda seed: blind(seed, TEMPERATURE),
    "all but workload and temperature": lambda seed: blind(seed, TEMPLATE, OVERLAP, PROMPT, SHAPE, TURNS),
    "all fits: never learns": unfitted,
    "outlier ejection": lambda seed: plain(seed, outlier_ejection=False),
    "outlier ejection and slowness": steady,
    "silent drafters": unwatched,
    "k by batch size": lambda seed: Unaware(LearnedSettings(seed=seed)),
    "sensitivity by depth": lambda seed: with_acceptance(seed, Insensitive),
    "prefix memory": without_prefixes,
    "time of prompts": lambda seed: of_backends(seed, lambda model: setattr(model, "prompt_time", Unlearned())),
}
"""`learned` without the part."""

_BLANK: dict[int, str] = {TEMPLATE: "", OVERLAP: "0", PROMPT: "4", SHAPE: "text", TURNS: "first", TEMPERATURE: "0"}
