"""What one client can have a backend accused of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.backend import Backend, EngineChange
from backends.speculation import Method
from policies.features.request import Endpoint, RequestFeatures
from policies.guarded.evidence import ALONE_ANSWERS, Evidence, Sources
from policies.guarded.outlier_ejection import OutlierEjection
from policies.guarded.silent_drafters import SilentDrafters

ARM = "eagle3:3"


def request(client: str = "", template: str = "", *, restricted: bool = False) -> RequestFeatures:
    return RequestFeatures("m", Endpoint.CHAT, client=client, template=template, restricted=restricted)


class Watched:
    """Drafters of which one is watched, whose engine counts drafts or does not."""

    def __init__(self, *, counts: bool = False) -> None:
        self.drafters = SilentDrafters()
        self.drafts = (1000, 1400) if counts else (0, 0)

    def answers(self, number: int, observed: float, one: RequestFeatures) -> bool:
        """Observe answers; return whether the drafter is silent after one of them."""
        for _ in range(number):
            if self.drafts[0]:
                self.drafts = self.drafts[0] + 60, self.drafts[1] + round(60 * (observed - 1.0))
            self.drafters.observe("a", ARM, 2.4, observed, 0.0, None, one, self.drafts)
            if self.drafters.silent:
                return True
        return False


def test_one_client_of_several_has_no_drafter_taken_for_silent() -> None:
    watched = Watched()
    watched.answers(20, 2.4, request("bystander"))
    assert not watched.answers(ALONE_ANSWERS - 5, 1.0, request("other"))
    assert watched.answers(4, 1.0, request("bystander")), "who else sees it is believed"


def test_the_only_client_is_believed() -> None:
    assert Watched().answers(8, 1.0, request("only", "one"))
    watched = Watched()
    watched.answers(20, 2.4, request("gone"))
    assert watched.answers(ALONE_ANSWERS + 20, 1.0, request("only", "one"))


def test_without_keys_templates_take_the_place_of_clients() -> None:
    watched = Watched()
    watched.answers(20, 2.4, request(template="one"))
    assert not watched.answers(60, 1.0, request(template="two"))
    assert watched.answers(4, 1.0, request(template="three"))


def test_requests_that_exclude_what_is_drafted_are_no_evidence() -> None:
    watched = Watched()
    for client in ("a", "b", "c"):
        assert not watched.answers(100, 1.0, request(client, restricted=True))
    assert not watched.drafters.is_suspect("a")


def test_an_engine_that_counts_accepted_drafts_is_believed() -> None:
    watched = Watched(counts=True)
    for _ in range(40):
        for client in ("one", "two", "three"):
            assert not watched.answers(1, 1.0, request(client))
        watched.drafts = watched.drafts[0] + 60, watched.drafts[1] + 84  # answers that others got


def test_an_engine_that_counts_no_accepted_draft_is_silent() -> None:
    watched = Watched(counts=True)
    clients = ("one", "two")
    assert any(watched.answers(1, 1.0, request(clients[number % 2])) for number in range(12))


def test_a_silent_drafter_is_trusted_again_whatever_another_client_asks() -> None:
    watched = Watched()
    watched.drafters.renew("a", EngineChange.RESTART)
    watched.answers(8, 1.0, request("other", "one"))
    assert watched.drafters.silent
    assert watched.answers(1, 2.4, request("bystander"))
    assert watched.answers(1, 1.0, request("other"))
    assert not watched.answers(1, 2.4, request("bystander"))


@pytest.mark.parametrize("ratios", [{"step_ratio": 8.0}, {"acceptance_ratio": 0.3}])
def test_one_client_of_several_has_no_backend_ejected(ratios: dict[str, float]) -> None:
    def observe(number: int, client: str, step_ratio: float = 1.0, acceptance_ratio: float = 1.0) -> None:
        for _ in range(number):
            ejection.observe("a", step_ratio, acceptance_ratio, 0.0, request=request(client))

    ejection = OutlierEjection()
    observe(20, "bystander")
    observe(ALONE_ANSWERS - 50, "other", **ratios)
    assert not ejection.reasons
    observe(6, "bystander", **ratios)
    assert ejection.reasons


def test_what_one_client_alone_has_shown_ejects_a_backend_for_its_own_requests() -> None:
    pool = [Backend(name, "m", Method.BASELINE, f"http://127.0.0.1:{port}") for port, name in enumerate("ab", 1)]

    def admitted(client: str) -> list[str]:
        return [each.name for each in ejection.admitted(pool, 0.0, client)]

    ejection = OutlierEjection()
    for number in range(2 * ALONE_ANSWERS):
        ejection.observe("a", 8.0, None, 0.0, request=request("one", "xy"[number % 2]))
    assert (admitted("one"), admitted("two")) == (["b"], ["a", "b"])
    for number in range(2 * ALONE_ANSWERS):
        ejection.observe("a", 8.0, None, 0.0, request=request("two", "xy"[number % 2]))
    assert (admitted("one"), admitted("never seen")) == (["b"], ["b"]), "two have"


@pytest.mark.parametrize(("accepted", "ejected"), [(84, False), (10, True)])
def test_an_engine_that_counts_enough_accepted_drafts_is_no_outlier(accepted: int, ejected: bool) -> None:
    ejection, drafts = OutlierEjection(), (1000, 1400)
    for number in range(60):
        drafts = drafts[0] + 60, drafts[1] + accepted
        client = ("one", "two", "three")[number % 3]
        ejection.observe("a", 1.0, 0.4, 0.0, request=request(client), expected=2.4, drafts=drafts)
    assert bool(ejection.reasons) is ejected


ANSWERS = st.lists(st.tuples(st.floats(-3, 2), st.sampled_from("abc"), st.sampled_from("xy")), max_size=60)


@given(ANSWERS)
def test_the_sum_is_never_above_that_without_sources(answers: list[tuple[float, str, str]]) -> None:
    evidence, sources, page = Evidence(), Sources(is_known=True), 0.0
    for log_likelihood, client, template in answers:
        one = request(client, template)
        evidence.add(log_likelihood, one, sources.see(one))
        page = max(0.0, page + log_likelihood)
        assert 0.0 <= evidence.total <= page + 1e-9
