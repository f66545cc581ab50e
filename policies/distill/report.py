"""The result of a distillation: rules and their predicted gain, also as text that can be read and pinned."""

from __future__ import annotations

from dataclasses import dataclass

from policies.rules.policy import ThresholdSettings

_MIN_GAIN = 0.002


@dataclass(frozen=True, slots=True)
class Leaf:
    """The requests of one rule.

    Examples
    --------
    >>> Leaf(0.25, {"eagle3": 1.5, "baseline": 2.25}).text
    '25% of the requests; seconds on an idle backend: eagle3 1.50, baseline 2.25'
    """

    share: float  # of the observed requests, 0 to 1
    idle_s: dict[str, float]  # mean cost on an idle backend in seconds, by target, in the order of the rule's weights

    @property
    def text(self) -> str:
        """The leaf as a comment for its rule."""
        costs = ", ".join(f"{target} {seconds:.2f}" for target, seconds in self.idle_s.items())
        return f"{self.share:.0%} of the requests; seconds on an idle backend: {costs}"


@dataclass(frozen=True, slots=True)
class Distilled:
    """Distilled rules and their predicted gain.

    A gain is the relative reduction of the mean time to finish against `least_loaded`, averaged over loads.
    """

    settings: ThresholdSettings
    leaves: tuple[Leaf, ...]  # requests of each rule
    learned_gain: float  # gain of the choice by prediction
    rules_gain: float  # gain of these rules
    default_gain: float  # gain of the default rules
    requests: float  # number of observed requests, weighted by age
    troubles: tuple[str, ...] = ()  # what the first rules are for, if something goes wrong with some requests

    @property
    def kept_share(self) -> float | None:
        """Share of the learned gain that the rules keep; None if there is almost none to keep."""
        return self.rules_gain / self.learned_gain if self.learned_gain > _MIN_GAIN else None

    @property
    def text(self) -> str:
        """The rules as YAML for `policy:` in a pool file, with their predicted gain as comments."""
        kept = "there is almost nothing to gain" if self.kept_share is None else f"{self.kept_share:.0%} of that gain"
        lines = [
            f"# From {self.requests:.0f} requests. Predicted mean time of more like them, to that of least_loaded:",
            f"# learned {-self.learned_gain:+.1%}, these rules {-self.rules_gain:+.1%} ({kept}),",
            f"# default rules {-self.default_gain:+.1%}.",
        ]
        if len(self.settings.rules) == 1:
            lines.append("# No condition on requests earned a rule of its own: all requests are treated alike.")
        lines += ["name: thresholds", "rules:"]
        reasons = [*self.troubles, *[leaf.text for leaf in self.leaves]]
        for rule, reason in zip(self.settings.rules, reasons, strict=True):
            lines += [f"  # {reason}", *(f"  {line}" for line in rule.lines())]
        return "\n".join(lines) + "\n"
