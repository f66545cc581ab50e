"""`learned` with one part switched off, for `benchmarks.routing.ablation`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from backends.backend import Candidate
from backends.draft_schedule import DraftSchedule
from backends.simulator.engine.replica import Replica
from policies.decision import Decision
from policies.features.request import ANY_REQUEST, Endpoint, RequestFeatures
from policies.guarded.evidence import Drafts
from policies.guarded.outlier_ejection import OutlierEjection
from policies.guarded.silent_drafters import Learned as Observation
from policies.guarded.silent_drafters import SilentDrafters
from policies.learned.models.acceptance import ACCEPTANCE, AcceptanceModel
from policies.learned.models.backend_model import BackendModel, FittedModels
from policies.learned.models.keys import OVERLAP, PROMPT, SHAPE, TEMPERATURE, TEMPLATE, TURNS, Key, Templates, key_of
from policies.learned.models.length import LengthModel
from policies.learned.models.prefix_memory import PrefixMemory
from policies.learned.models.step_time import PromptTime
from policies.learned.policy import Learned, LearnedSettings

FLAT = 2.0
"""Tokens per step of every drafter where the prior is flat."""


class Flat(AcceptanceModel):
    """Expects the same of all methods, kinds of work and temperatures, as long as nothing is observed."""

    def depths(self, arm: str, request: Key, context_tokens: float = 0.0) -> tuple[float, ...]:
        """Return the calibration's depths, with other tokens per step at the last."""
        *lower, last = super().depths(arm, _CHAT)
        return (*lower, last if not lower else math.log(FLAT))


_CHAT = key_of(RequestFeatures("", Endpoint.CHAT, temperature=0.0))


class Blind(Templates):
    """Keys without some of the features."""

    def __init__(self, blank: Sequence[int]) -> None:
        super().__init__()
        self.blank = blank

    def key(self, request: RequestFeatures, *, counts: bool = True) -> Key:
        """Return the bucket key, in which some features are as those of any request."""
        key = list(super().key(request, counts=counts))
        for index in self.blank:
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
        request: RequestFeatures = ANY_REQUEST,
        drafts: Drafts = (0, 0),
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


class Part(NamedTuple):
    """How to switch a part off: by settings, and by a change of the policy."""

    settings: Mapping[str, Any] = {}
    change: Callable[[Learned], object] = id


def without(seed: int, *parts: str) -> Learned:
    """Return `learned` without some of its parts."""
    settings: dict[str, Any] = {"seed": seed}
    for part in parts:
        settings |= PARTS[part].settings
    policy = Learned(LearnedSettings.model_validate(settings))
    for part in parts:
        PARTS[part].change(policy)
    policy._assemble()
    return policy


def _refit(policy: Learned, change: Callable[[FittedModels], FittedModels]) -> None:
    """Change each fit of the policy, also what it has before the first."""
    fitted = policy.fitted
    policy.fitted = lambda *given: change(fitted(*given))  # type: ignore[method-assign]
    policy.predictor.learn(change(policy.predictor.fitted))


def _expect(kind: type[AcceptanceModel]) -> Callable[[Learned], None]:
    def change(policy: Learned) -> None:
        def fit(fitted: FittedModels) -> FittedModels:
            buckets = policy.statistics.buckets(ACCEPTANCE)
            return replace(fitted, acceptance=kind.fit(buckets, policy.settings.calibration))

        _refit(policy, fit)

    return change


def _blind(*blank: int) -> Callable[[Learned], None]:
    def change(policy: Learned) -> None:
        before = policy.templates.blank if isinstance(policy.templates, Blind) else ()
        policy.templates = Blind((*before, *blank))

    return change


def _of_backends(change: Callable[[BackendModel], object]) -> Callable[[Learned], None]:
    def change_all(policy: Learned) -> None:
        of = policy.predictor.of

        def changed(candidate: Candidate) -> BackendModel:
            model = of(candidate)
            change(model)
            return model

        policy.predictor.of = changed  # type: ignore[method-assign]

    return change_all


def _take_k_as_fixed(policy: Learned) -> None:
    choose = policy.choose

    def unaware(request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        for candidate in candidates:
            assert isinstance(candidate, Replica)
            candidate.draft_schedule = DraftSchedule(candidate.num_speculative_tokens)
        return choose(request, candidates)

    policy.choose = unaware  # type: ignore[method-assign]


PARTS: dict[str, Part] = {
    "exploration": Part({"exploration": {"share": 0}}),
    "control group": Part({"guardrail": {"share": 0}}),
    "length model": Part(change=lambda one: _refit(one, lambda fitted: replace(fitted, length=LengthModel()))),
    "prior of acceptance": Part(change=_expect(Flat)),
    "shadow drafting": Part({"shadow_drafting": {"sample": 0}}),
    # One factor on all step times would change no choice.
    "step fit": Part(change=lambda one: _refit(one, lambda fitted: replace(fitted, steps={}, levels={}))),
    "templates": Part(change=_blind(TEMPLATE)),
    "overlap": Part(change=_blind(OVERLAP)),
    "length of the prompt": Part(change=_blind(PROMPT)),
    "shape and turns": Part(change=_blind(SHAPE, TURNS)),
    "temperature": Part(change=_blind(TEMPERATURE)),
    "all but workload and temperature": Part(change=_blind(TEMPLATE, OVERLAP, PROMPT, SHAPE, TURNS)),
    "all fits: never learns": Part(change=lambda one: setattr(one, "maintenance", lambda: None)),
    "outlier ejection": Part({"outlier_ejection": False}),
    "outlier ejection and slowness": Part(change=lambda one: setattr(one, "outlier_ejection", Steady())),
    "silent drafters": Part(change=lambda one: setattr(one, "drafters", Unwatched())),
    "k by batch size": Part(change=_take_k_as_fixed),
    "prefix memory": Part(change=lambda one: setattr(one.predictor, "prefixes", NoPrefixes())),
    "time of prompts": Part(change=_of_backends(lambda model: setattr(model, "prompt_time", Unlearned()))),
}

_BLANK: dict[int, str] = {TEMPLATE: "", OVERLAP: "0", PROMPT: "4", SHAPE: "text", TURNS: "first", TEMPERATURE: "0"}
