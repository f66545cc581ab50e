"""Every policy passes the checks, and each check finds a policy that breaks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policies.checks import check_policy
from policies.policy import policies
from tests.support.installed_module import installed

GUARDED = {"guardrail": {"share": 0.3, "block_s": 5}, "outlier_ejection": True}
NEEDED: dict[str, dict[str, Any]] = {"static": {"method": "ngram"}}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, GUARDED], ids=["plain", "guarded"])
@pytest.mark.parametrize("name", sorted(policies()))
def test_every_policy_keeps_what_the_gateway_relies_on(name: str, settings: dict[str, Any]) -> None:
    check_policy(name, NEEDED.get(name, {}) | settings)


BROKEN = '''
from dataclasses import replace
from policies.balancing.least_loaded import LeastLoaded
from policies.policy import Decision, register


@register
class Broken(LeastLoaded):
    """A policy that breaks a rule."""

    name = "broken"

    def choose(self, request, candidates, rng=None):
        return {broken}
'''


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ('Decision("elsewhere", self.name, "lost")', "elsewhere is no candidate"),
        ('Decision(candidates[0].name, self.name, "first", propensity=0.0)', "the propensity is 0.0"),
        ('Decision(candidates[0].name, self.name, f"of {len(candidates)}")', "policy='broken', reason='of "),
        ('Decision(candidates[int(self.rng.random() * len(candidates))].name, self.name, "drawn")', "but foretold"),
    ],
)
def test_a_policy_that_breaks_a_rule_is_found(tmp_path: Path, broken: str, message: str) -> None:
    with installed(tmp_path, "broken", BROKEN.format(broken=broken), "broken = broken"):
        with pytest.raises(AssertionError, match=message):
            check_policy("broken")


def test_a_method_of_a_role_that_is_not_inherited_is_named(tmp_path: Path) -> None:
    module = BROKEN.format(broken="Decision(candidates[0].name, self.name, 'first')")
    with installed(tmp_path, "broken", module + "\n    def observe(self, outcome): ...\n", "broken = broken"):
        with pytest.raises(TypeError, match=r"Broken has `observe`: derive it from `policies.roles.Learner`"):
            check_policy("broken")
