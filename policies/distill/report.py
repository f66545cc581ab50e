"""Rules that were made from experience, with what they are worth, as a text that a person reads and can pin."""

from __future__ import annotations

from dataclasses import dataclass

from policies.rules.policy import ThresholdSettings

_LEAST_GAIN = 0.002


@dataclass(frozen=True, slots=True)
class Leaf:
    """What is known of the requests of one rule.

    Parameters
    ----------
    share
        Of the requests, 0 to 1; 0 where only requests are meant that declare less than those that were seen.
    idle_s
        By target, in the order of the rule's weights: cost of such a request on an idle backend, in seconds.
    """

    share: float
    idle_s: dict[str, float]

    @property
    def text(self) -> str:
        """The same in words."""
        seen = f"{self.share:.0%} of the requests" if self.share else "like some that were seen, but undeclared"
        costs = ", ".join(f"{target} {seconds:.2f}" for target, seconds in self.idle_s.items())
        return f"{seen}; seconds on an idle backend: {costs}"


@dataclass(frozen=True, slots=True)
class Distilled:
    """Rules, and what they are worth.

    Parameters
    ----------
    leaves
        One for each rule.
    learned_gain, rules_gain
        By how much mean time to finish is below that of `least_loaded`, as the mean over loads and mixes: choosing by
        prediction, and by the rules.
    default_gain
        The same by the rules that come with the gateway.
    requests
        Observed, weighed by age, that this is made of.
    """

    settings: ThresholdSettings
    leaves: tuple[Leaf, ...]
    learned_gain: float
    rules_gain: float
    default_gain: float
    requests: float

    @property
    def kept_share(self) -> float | None:
        """Share of the gain over `least_loaded` that the rules keep; None where there is next to none to keep."""
        return self.rules_gain / self.learned_gain if self.learned_gain > _LEAST_GAIN else None

    @property
    def text(self) -> str:
        """The rules as they stand under `policy:` in a pool file, with what they are worth."""
        kept = "there is next to nothing to gain" if self.kept_share is None else f"{self.kept_share:.0%} of that gain"
        lines = [
            f"# From {self.requests:.0f} requests. Mean time to finish against least_loaded, by what was learned:",
            f"# the prediction {-self.learned_gain:+.1%}, these rules {-self.rules_gain:+.1%} ({kept}),",
            f"# the default rules {-self.default_gain:+.1%}.",
            "name: thresholds",
            "rules:",
        ]
        for rule, leaf in zip(self.settings.rules, self.leaves, strict=True):
            lines += [f"  # {leaf.text}", *(f"  {line}" for line in rule.lines())]
        return "\n".join(lines) + "\n"
