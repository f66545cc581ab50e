"""The `thresholds` policy: readable rules that map conditions on request and load to preferred methods."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Self

from pydantic import Field, model_validator

from backends.backend import Candidate
from backends.validation import CheckedModel, Issue, error_of
from policies.features.request import TEXT_FEATURES, RequestFeatures
from policies.load import draw_least, per_weight
from policies.load_policy import LoadPolicy, LoadSettings
from policies.policy import Assessment, Decision, SettingsPath, register
from policies.rules.matching import CompiledRule, first_match, first_preferred, is_target, least_per_weight
from policies.rules.rule import BACKEND, NO_RULE, NONE_PREFERRED, SPILLED, Rule, default_rules


class Spill(CheckedModel):
    """The load limit of a preferred backend: `slack + ratio * least`, where `least` is the lowest load of all.

    If every request went to the backend that is fastest for it alone, it would slow the requests already running there.
    A small batch costs hardly more than a single request, hence the slack. Above it, a backend with `ratio` times
    another's load has lost what its method gains.
    """

    slack: float = Field(default=8.0, ge=0, description="Requests per unit of weight that are always allowed.")
    ratio: float = Field(default=1.25, ge=1, description="Allowed multiple of the least loaded backend's requests.")

    def bound(self, least: float, slack: float | None = None) -> float:
        """Return the maximum requests per unit of weight on a preferred backend; `slack` overrides the setting."""
        return (self.slack if slack is None else slack) + self.ratio * least


class ThresholdSettings(LoadSettings):
    """The rules, in order of precedence, and the load limit of preferred backends."""

    rules: tuple[Rule, ...] = Field(
        default_factory=default_rules,
        description="The rules; the first whose conditions hold decides.",
        json_schema_extra={"minItems": 1},
    )
    spill: Spill = Field(default=Spill(), description=Spill.__doc__)

    @model_validator(mode="after")
    def _each_rule_counts(self) -> Self:
        issues = [] if self.rules else [Issue(("rules",), "no rules", "write one, or remove `rules` for the defaults")]
        names: set[str] = set()
        catch_all = ""
        for index, rule in enumerate(self.rules):
            if rule.name in names:
                issues.append(Issue(("rules", index, "name"), f"two rules are called '{rule.name}'", "rename one"))
            if catch_all:
                hint = f"'{catch_all}' has no conditions and matches every request: put it last"
                issues.append(Issue(("rules", index), f"rule '{rule.name}' is never reached", hint))
            elif not rule.when.conditions():
                catch_all = rule.name
            names.add(rule.name)
        if issues:
            raise error_of(type(self).__name__, issues)
        return self

    def named_backends(self) -> dict[SettingsPath, str]:
        """Return the backends that the rules name."""
        return {
            ("rules", index, *path): target.removeprefix(BACKEND)
            for index, rule in enumerate(self.rules)
            for path, target in _targets(rule)
            if target.startswith(BACKEND)
        }


def _targets(rule: Rule) -> list[tuple[SettingsPath, str]]:
    if rule.weights:
        return [(("weights", target), target) for target in rule.weights]
    return [(("prefer", index), target) for index, target in enumerate(rule.prefer)]


@register
class Thresholds(LoadPolicy):
    """A policy that follows the first rule that matches a request, load permitting.

    A rule with `prefer` picks the least loaded backend of the first target in its list whose load is within the limit
    (`Spill`), else the least loaded backend of all. A rule with `weights` picks the backend with the lowest
    (requests + 1 + slack) / weight: in an idle pool the one with the largest weight, under load all in proportion to
    their weights.

    The reason of a decision is the rule's name. It is `spilled` if all its targets are over the limit, `none_preferred`
    if none of its targets is available, and `no_rule` if no rule matches.
    """

    name = "thresholds"
    Settings = ThresholdSettings
    settings: ThresholdSettings

    def __init__(self, settings: ThresholdSettings) -> None:
        super().__init__(settings)
        self._rules = [CompiledRule(rule) for rule in settings.rules]
        self.text_features = TEXT_FEATURES & frozenset[str]().union(*[rule.features for rule in self._rules])

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate], rng: Random | None = None) -> Decision:
        """Choose by the first rule whose conditions hold."""
        counts = self.meter.counts(candidates)
        rule = first_match(self._rules, request, sum(counts) / len(counts))
        reason = NO_RULE
        if rule is not None and rule.weights:
            named, scores = self._weighted(rule, candidates, counts)
            if named:
                chosen, propensity = draw_least(named, scores, rng or self.rng)
                return Decision(chosen.name, self.name, rule.name, propensity)
            reason = NONE_PREFERRED
        elif rule is not None:
            bound = self._bound(rule, candidates, counts)
            preferred, propensity, any_target = first_preferred(rule.prefer, candidates, counts, bound, rng or self.rng)
            if preferred is not None:
                return Decision(preferred.name, self.name, rule.name, propensity)
            reason = SPILLED if any_target else NONE_PREFERRED
        chosen, propensity = self.meter.least(candidates, rng or self.rng)
        return Decision(chosen.name, self.name, reason, propensity)

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Rate each candidate by the matching rule: by its place in the rule's list, or by its weight and load."""
        counts = self.meter.counts(candidates)
        rule = first_match(self._rules, request, sum(counts) / len(counts))
        if rule is None:
            return [
                Assessment(load.backend, load.score, f"no rule matches; {load.note}")
                for load in super().assess(request, candidates)
            ]
        if rule.weights:
            return self._assess_weighted(rule, candidates, counts)
        bound = self._bound(rule, candidates, counts)
        loads = [per_weight(candidate, count) for candidate, count in zip(candidates, counts, strict=True)]
        return [self._assess_preferred(rule, *pair, bound) for pair in zip(candidates, loads, strict=True)]

    def _assess_weighted(self, rule: Rule, candidates: Sequence[Candidate], counts: Sequence[int]) -> list[Assessment]:
        prefix = f"rule '{rule.name}' ({rule.when})"
        named, scores = self._weighted(rule, candidates, counts)
        score_of = {candidate.name: score for candidate, score in zip(named, scores, strict=True)}
        return [
            Assessment(
                candidate.name,
                score_of[candidate.name],
                f"{prefix}: ({per_weight(candidate, count + 1):g} requests with this one + slack "
                f"{self._slack(rule):g}) / weight {rule.weight_of(candidate):g}",
            )
            if candidate.name in score_of
            else Assessment(candidate.name, None, f"{prefix} does not name it")
            for candidate, count in zip(candidates, counts, strict=True)
        ]

    def _assess_preferred(self, rule: Rule, candidate: Candidate, requests: float, bound: float) -> Assessment:
        prefix = f"rule '{rule.name}' ({rule.when})"
        rank = next((rank for rank, target in enumerate(rule.prefer, 1) if is_target(candidate, target)), None)
        if rank is None:
            return Assessment(candidate.name, None, f"{prefix} does not name it")
        if requests > bound:
            note = f"{prefix} names it at place {rank}; skipped: {requests:g} requests are over the limit of {bound:g}"
            return Assessment(candidate.name, None, note)
        return Assessment(candidate.name, float(rank), f"{prefix} names it at place {rank}; {requests:g} requests")

    def _bound(self, rule: Rule, candidates: Sequence[Candidate], counts: Sequence[int]) -> float:
        return self.settings.spill.bound(least_per_weight(candidates, counts), rule.slack)

    def _weighted(
        self, rule: Rule, candidates: Sequence[Candidate], counts: Sequence[int]
    ) -> tuple[list[Candidate], list[float]]:
        """Return the candidates to which a rule gives a weight, and their scores."""
        slack = self._slack(rule)
        named, scores = [], []
        for candidate, count in zip(candidates, counts, strict=True):
            weight = rule.weight_of(candidate)
            if weight is not None:
                named.append(candidate)
                scores.append((per_weight(candidate, count + 1) + slack) / weight)
        return named, scores

    def _slack(self, rule: Rule) -> float:
        return self.settings.spill.slack if rule.slack is None else rule.slack
