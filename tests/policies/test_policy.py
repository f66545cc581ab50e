from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.backend import Backend
from backends.speculation import Method
from policies.features.request import Endpoint, RequestFeatures
from policies.policy import Policy, policies, register
from policies.roles import assess, preview
from tests.support.installed_module import installed

ONE_SMALL_FILE = '''
from policies.policy import Decision, Policy, PolicySettings, register


class LongestNameSettings(PolicySettings):
    at_most: int = 99


@register
class LongestName(Policy):
    """A policy that chooses the longest name."""

    name = "longest_name"
    Settings = LongestNameSettings

    def choose(self, request, candidates):
        names = [candidate.name for candidate in candidates if len(candidate.name) <= self.settings.at_most]
        return Decision(max(names, key=len), self.name, "longest")
'''


@pytest.fixture
def new_policy(tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path, "longest_name", ONE_SMALL_FILE, "longest_name = longest_name"):
        yield


@pytest.mark.usefixtures("new_policy")
def test_a_new_policy_is_one_small_file() -> None:
    policy = policies()["longest_name"]
    built = policy(policy.Settings.model_validate({"at_most": 3}))
    pool = [Backend(name, "m", Method.NGRAM, "http://127.0.0.1:1") for name in ("a", "ccc", "bb", "dddd")]
    request = RequestFeatures(model="m", endpoint=Endpoint.CHAT)
    assert built.choose(request, pool).backend == "ccc"
    assert [rating.backend for rating in assess(built, request, pool)] == ["a", "ccc", "bb", "dddd"]
    assert preview(built, request, pool) == built.choose(request, pool)


def test_two_policies_cannot_share_a_name() -> None:
    taken = policies()["round_robin"]
    with pytest.raises(ValueError, match="two policies are called 'round_robin'"):
        register(type("Other", (taken,), {}))
    assert policies()["round_robin"] is taken
    assert issubclass(taken, Policy)
