"""Rules that a person can read: conditions on the request and the load, and the methods to take where they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from backends.backend import Candidate
from backends.validation import Issue, error_of
from policies.features.request import TEXT_FEATURES, RequestFeatures
from policies.load import draw_least, per_weight
from policies.load_balancing import LoadPolicy, LoadSettings
from policies.policy import Assessment, Decision, SettingsPath, register
from policies.rules.matching import RuleTests, first_preferred, first_that_holds, least_per_weight
from policies.rules.rule import BACKEND, NO_RULE, NONE_PREFERRED, SPILLED, Rule, default_rules, is_meant


class Spill(BaseModel):
    """How much more than the least loaded backend a preferred one may have: `slack + ratio * least` requests.

    Sending each request where it alone is fastest makes everybody slower once there is load: a request slows those that
    already run there. Up to some number of requests a batch costs no more than a single one, hence the slack; from then
    on a backend with `ratio` times the work of another has lost what its method gained.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    slack: float = Field(default=8.0, ge=0, description="Requests that do not count, per unit of weight.")
    ratio: float = Field(default=1.25, ge=1, description="Times the requests of the least loaded backend.")

    def bound(self, least: float, slack: float | None = None) -> float:
        """Return the most requests per unit of weight that a preferred backend may have; a rule may have own slack."""
        return (self.slack if slack is None else slack) + self.ratio * least


class ThresholdSettings(LoadSettings):
    """The rules, tried in order, and how much load a preference may pile up."""

    rules: tuple[Rule, ...] = Field(
        default_factory=default_rules,
        description="The first whose conditions hold decides.",
        json_schema_extra={"minItems": 1},
    )
    spill: Spill = Field(default=Spill(), description="When a preferred backend is passed over for its load.")

    @model_validator(mode="after")
    def _each_rule_counts(self) -> Self:
        issues = (
            [] if self.rules else [Issue(("rules",), "no rules", "write one, or leave `rules` out for the defaults")]
        )
        names: set[str] = set()
        catch_all = ""
        for position, rule in enumerate(self.rules):
            if rule.name in names:
                issues.append(Issue(("rules", position, "name"), f"two rules are called '{rule.name}'", "rename one"))
            if catch_all:
                hint = f"'{catch_all}' has no conditions and takes every request: put it last"
                issues.append(Issue(("rules", position), f"rule '{rule.name}' is never reached", hint))
            elif not rule.when.conditions():
                catch_all = rule.name
            names.add(rule.name)
        if issues:
            raise error_of(type(self).__name__, issues)
        return self

    def named_backends(self) -> dict[SettingsPath, str]:
        """Return the backends that rules prefer by name."""
        return {
            ("rules", position, *place): target.removeprefix(BACKEND)
            for position, rule in enumerate(self.rules)
            for place, target in _named(rule)
            if target.startswith(BACKEND)
        }


def _named(rule: Rule) -> list[tuple[SettingsPath, str]]:
    if rule.weights:
        return [(("weights", target), target) for target in rule.weights]
    return [(("prefer", place), target) for place, target in enumerate(rule.prefer)]


@register
class Thresholds(LoadPolicy):
    """Sends each request where the first rule that matches it says, load permitting.

    Of a preferred method the least loaded backend is taken; where that has too much to do (`Spill`), the next in the
    rule's list; where the list ends, the least loaded backend of all. Of a rule with weights that backend is taken
    whose (requests + 1 + slack) / weight is least: with nothing to do the one of the largest weight, and under load all
    of them, in proportion to their weights. Reasons: the rule's name; `spilled` where load kept it from every backend
    of its list, `none_preferred` where none of them is there, `no_rule` where no rule matches.
    """

    name = "thresholds"
    Settings = ThresholdSettings
    settings: ThresholdSettings

    def __init__(self, settings: ThresholdSettings) -> None:
        super().__init__(settings)
        self._rules = [RuleTests(rule) for rule in settings.rules]
        self.text_features = TEXT_FEATURES & frozenset[str]().union(*[one.features for one in self._rules])

    def choose(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> Decision:
        """Choose by the first rule whose conditions hold."""
        counts = self.meter.counts(candidates)
        rule = first_that_holds(self._rules, request, sum(counts) / len(counts))
        reason = NO_RULE
        if rule is not None and rule.weights:
            named, scores = self._weighed(rule, candidates, counts)
            if named:
                chosen, propensity = draw_least(named, scores, self.rng)
                return Decision(chosen.name, self.name, rule.name, propensity)
            reason = NONE_PREFERRED
        elif rule is not None:
            bound = self._bound(rule, candidates, counts)
            preferred, propensity, is_there = first_preferred(rule.prefer, candidates, counts, bound, self.rng)
            if preferred is not None:
                return Decision(preferred.name, self.name, rule.name, propensity)
            reason = SPILLED if is_there else NONE_PREFERRED
        chosen, propensity = self.meter.least(candidates, self.rng)
        return Decision(chosen.name, self.name, reason, propensity)

    def assess(self, request: RequestFeatures, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Tell for each candidate its place or weight in the rule, the score, and whether load rules it out."""
        counts = self.meter.counts(candidates)
        rule = first_that_holds(self._rules, request, sum(counts) / len(counts))
        if rule is None:
            return [
                Assessment(load.backend, load.score, f"no rule matches; {load.note}")
                for load in super().assess(request, candidates)
            ]
        if rule.weights:
            return self._assess_weighed(rule, candidates, counts)
        bound = self._bound(rule, candidates, counts)
        return [self._assess_by(rule, candidate, bound) for candidate in candidates]

    def _assess_weighed(self, rule: Rule, candidates: Sequence[Candidate], counts: Sequence[int]) -> list[Assessment]:
        why = f"rule '{rule.name}' ({rule.when})"
        scores = {one.name: score for one, score in zip(*self._weighed(rule, candidates, counts), strict=True)}
        return [
            Assessment(
                one.name,
                scores[one.name],
                f"{why}: ({per_weight(one, count + 1):g} requests with this one + slack {self._slack(rule):g}) "
                f"/ weight {rule.weight_of(one):g}",
            )
            if one.name in scores
            else Assessment(one.name, None, f"{why} does not name it")
            for one, count in zip(candidates, counts, strict=True)
        ]

    def _assess_by(self, rule: Rule, candidate: Candidate, bound: float) -> Assessment:
        why = f"rule '{rule.name}' ({rule.when})"
        place = next((place for place, target in enumerate(rule.prefer, 1) if is_meant(target, candidate)), None)
        if place is None:
            return Assessment(candidate.name, None, f"{why} does not name it")
        requests = self.meter.per_weight(candidate)
        if requests > bound:
            note = f"{why} names it at place {place}; passed over: {requests:g} requests, at most {bound:g} go by rule"
            return Assessment(candidate.name, None, note)
        return Assessment(candidate.name, float(place), f"{why} names it at place {place}; {requests:g} requests")

    def _bound(self, rule: Rule, candidates: Sequence[Candidate], counts: Sequence[int]) -> float:
        return self.settings.spill.bound(least_per_weight(candidates, counts), rule.slack)

    def _weighed(
        self, rule: Rule, candidates: Sequence[Candidate], counts: Sequence[int]
    ) -> tuple[list[Candidate], list[float]]:
        """Return the candidates that a rule has weights for, and their scores."""
        slack = self._slack(rule)
        named, scores = [], []
        for one, count in zip(candidates, counts, strict=True):
            weight = rule.weight_of(one)
            if weight is not None:
                named.append(one)
                scores.append((per_weight(one, count + 1) + slack) / weight)
        return named, scores

    def _slack(self, rule: Rule) -> float:
        return self.settings.spill.slack if rule.slack is None else rule.slack
