"""Rules from experience: what the tree finds, what the rules say of it, and what they are worth."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import numpy as np
import pytest

from backends.backend import Backend
from backends.speculation import Method
from gateway.pinning import settings_of
from gateway.policy_option import named_policies
from policies.cells import LIMITS, key_of
from policies.distill import Distilled, NothingLearnedError, distill
from policies.fluid import FluidBackend, Job, fluid_pool, play
from policies.learned import Learned, LearnedSettings
from policies.load import LoadMeter
from policies.policy import Outcome
from policies.predict import Predictor
from policies.prior import StepCost
from policies.request import Endpoint, RequestFeatures
from policies.rule_tree import Leaf, columns_of, grow, row_of, shortened
from policies.thresholds import Thresholds, ThresholdSettings

CODE = {"baseline": 1.0, "ngram": 4.0, "suffix": 4.6, "eagle3": 1.9}
LEVELS = (1.0, 6.0)
CHAT = {"baseline": 1.0, "ngram": 1.2, "suffix": 1.5, "eagle3": 2.7}


def pool() -> list[Backend]:
    drafted = {"baseline": 0, "ngram": 5, "suffix": 24, "eagle3": 3}
    return [
        Backend(name, "m", Method(name), "http://127.0.0.1:9", num_speculative_tokens=k) for name, k in drafted.items()
    ]


def request(**features: object) -> RequestFeatures:
    return RequestFeatures("m", Endpoint.CHAT, **features)  # type: ignore[arg-type]


def train(policy: Learned, requests: int = 500) -> None:
    """Show it requests that tell by their temperature what they are."""
    now_s, rng, backends = 1e9, Random(0), pool()
    policy.set_clock(lambda: now_s)
    for _ in range(requests):
        code = rng.random() < 0.5
        asked = request(temperature=0.0 if code else 0.7, prompt_tokens=rng.randint(40, 900))
        decision = policy.choose(asked, backends)
        per_step = (CODE if code else CHAT)[decision.backend] * rng.lognormvariate(0.0, 0.1)
        tokens, step_s = int(rng.lognormvariate(5.0, 0.5)) + 8, 0.009
        tpot_s = step_s / max(1.0, per_step)
        now_s += 0.01
        method = Method(decision.backend)
        policy.observe(
            Outcome(asked, decision, method, 200, 0.02, tpot_s, 0.02 + tpot_s * tokens, 100, tokens, max(1.0, per_step))
        )


@pytest.fixture(scope="module")
def policy() -> Learned:
    trained = Learned(LearnedSettings(seed=0))
    train(trained)
    return trained


@pytest.fixture(scope="module")
def distilled(policy: Learned) -> Distilled:
    return distill(policy, pool(), levels=LEVELS)


def first_choice(settings: ThresholdSettings, asked: RequestFeatures) -> str:
    return Thresholds(settings).choose(asked, pool()).backend


def test_the_rules_send_each_kind_where_it_was_learned_to_be_fast(distilled: Distilled) -> None:
    code, chat = request(temperature=0.0, prompt_tokens=300), request(temperature=0.7, prompt_tokens=300)
    assert first_choice(distilled.settings, code) in ("suffix", "ngram")
    assert first_choice(distilled.settings, chat) == "eagle3"
    assert 2 <= len(distilled.leaves) <= 12
    assert sum(leaf.share for leaf in distilled.leaves) == pytest.approx(1.0)


def test_they_keep_most_of_the_gain_and_beat_rules_that_know_nothing(distilled: Distilled) -> None:
    assert distilled.learned_gain > 0.1
    assert distilled.kept_share is not None
    assert distilled.kept_share > 0.75
    assert distilled.rules_gain > distilled.default_gain


def test_the_text_is_a_policy_and_means_the_same(distilled: Distilled, tmp_path: Path) -> None:
    assert settings_of(distilled.text) == distilled.settings
    path = tmp_path / "rules.yaml"
    path.write_text(distilled.text)
    (from_file,) = named_policies([str(path)]).values()
    assert isinstance(from_file, Thresholds)
    assert from_file.settings == distilled.settings
    assert f"{distilled.kept_share:.0%} of that gain" in distilled.text


def test_it_says_the_same_twice_and_changes_nothing(policy: Learned, distilled: Distilled) -> None:
    before = dict(policy.predictor.known)
    assert distill(policy, pool(), levels=LEVELS).text == distilled.text
    assert policy.predictor.known == before


def test_there_must_be_something_to_learn_from_and_to_choose_between(policy: Learned) -> None:
    with pytest.raises(NothingLearnedError, match="no request was observed"):
        distill(Learned(LearnedSettings()), pool())
    with pytest.raises(NothingLearnedError, match="two backends"):
        distill(policy, pool()[:1])


def test_backends_of_a_method_that_are_not_alike_are_preferred_by_name(policy: Learned) -> None:
    backends = [*pool(), Backend("eagle-5", "m", Method.EAGLE3, "http://127.0.0.1:9", num_speculative_tokens=5)]
    preferred = distill(policy, backends, levels=(2.0,)).leaves[0].prefer
    assert set(preferred) <= {"baseline", "ngram", "suffix", "backend:eagle3", "backend:eagle-5"}
    assert "eagle3" not in preferred


def test_pinned_rules_decide_and_the_policy_goes_on_learning(distilled: Distilled) -> None:
    policy = Learned(LearnedSettings(seed=0))
    policy.pinned = Thresholds(distilled.settings)
    decision = policy.choose(request(temperature=0.7, prompt_tokens=300), pool())
    assert (decision.policy, decision.backend) == ("thresholds", "eagle3")
    assert policy.assess(request(temperature=0.7), pool())[0].note.startswith("rule")
    train(policy, 50)
    assert all(policy.experience.cells(table) for table in policy.experience.tables.values())
    assert np.isnan(policy.guardrail.ratio), "rules take no part in the comparison"


def test_every_request_meets_the_rule_of_its_leaf() -> None:
    """The upper side of a question is not said: rules that come before must have taken the lower one."""
    situations = [
        (request(workload=workload, structured=structured, max_tokens=limit, temperature=temperature), load)
        for workload, structured, limit, temperature, load in itertools.product(
            ("", "chat", "code.v2"), (False, True), (None, 100, 5000), (0.0, 0.9), (0.0, 3.0, 40.0)
        )
    ]

    def best(asked: RequestFeatures, load: float) -> str:
        if asked.workload == "code.v2":
            return "suffix" if load < 4 else "ngram"
        if asked.structured:
            return "ngram"
        if asked.max_tokens is None:
            return "eagle3" if asked.temperature < 0.5 else "baseline"
        return "suffix"

    targets = [backend.name for backend in pool()]
    keys = [key_of(asked) for asked, _ in situations]
    columns = columns_of(keys)
    rows = np.array([row_of(columns, key, load) for key, (_, load) in zip(keys, situations, strict=True)])
    wanted = [best(*situation) for situation in situations]
    costs = np.array([[1.0 if name == one else 2.0 for name in targets] for one in wanted])
    leaves = grow(columns, rows, costs, np.ones(len(rows)), targets, 12)
    rules = [{"name": leaf.name, "when": leaf.when, "prefer": leaf.prefer} for leaf in leaves]
    settings = ThresholdSettings.model_validate({"rules": rules, "spill": {"slack": 1000}})
    for (asked, load), one in zip(situations, wanted, strict=True):
        backends = pool()
        for backend in backends:
            backend.in_flight = int(load)
        assert Thresholds(settings).choose(asked, backends).backend == one, (asked, load)


def test_a_tree_is_no_larger_than_allowed_and_than_it_is_worth() -> None:
    asked = [request(temperature=t, prompt_tokens=p) for t in (0.0, 0.5, 0.9) for p in (10, 100, 200, 400, 900)]
    keys = [key_of(one) for one in asked]
    columns = columns_of(keys)
    rows = np.array([row_of(columns, key, 1.0) for key in keys])
    costs = np.random.default_rng(0).uniform(1.0, 2.0, (len(rows), 3))
    targets = ["baseline", "ngram", "suffix"]
    small, large = (grow(columns, rows, costs, np.ones(len(rows)), targets, most) for most in (4, 12))
    assert 2 <= len(small) <= 4 < len(large) <= 12
    (alone,) = grow(columns, rows, np.tile([2.0, 1.0], (len(rows), 1)), np.ones(len(rows)), ["baseline", "ngram"], 4)
    assert (alone.name, alone.when, alone.prefer) == ("default", {}, ("ngram", "baseline"))
    assert len(columns[4].says) == len(LIMITS) + 1


def test_shorter_preferences_need_fewer_rules() -> None:
    leaves = [
        Leaf("x", {"temperature": "< 0.35"}, 0.5, ("suffix", "ngram"), (0.8, 1.2)),
        Leaf("y", {"overlap": "< 0.06"}, 0.1, ("ngram", "suffix"), (0.5, 1.5)),
        Leaf("default", {}, 0.3, ("ngram", "eagle3"), (0.9, 1.1)),
    ]
    assert shortened(leaves, 2) == leaves
    first, last = shortened(leaves, 1)
    assert (first.name, first.prefer) == ("x", ("suffix",))
    assert (last.name, last.when, last.prefer) == ("default", {}, ("ngram",))
    assert list(last.costs) == pytest.approx([0.8])
    assert last.share == pytest.approx(0.4)


def test_time_in_the_fluid_pool_is_that_of_the_steps_it_takes() -> None:
    cost = StepCost(0.010, 0.001, 1e-6, 1e-4)
    predictor = Predictor(LoadMeter())
    (backend,) = fluid_pool(predictor, pool()[:1])
    backend = FluidBackend(backend.name, backend.method, 0, 1.0, cost)
    asked = request(prompt_tokens=200)
    one = Job(asked, key_of(asked), 100.0, 0.0)

    def alone(context: float) -> float:
        return 0.010 + 0.001 + 1e-6 * context

    took_s = play([one], predictor, [backend], lambda job, backends, now_s: 0, lambda number: None)
    assert took_s == pytest.approx(200 * 1e-4 + 100 * alone(250))
    assert backend.in_flight == 0

    # The second comes half-way, computes its prompt while the first waits, shares its last steps, and goes on alone.
    half_s = 200 * 1e-4 + 50 * alone(250)
    both = [one, Job(asked, key_of(asked), 100.0, half_s)]
    (backend,) = [FluidBackend(backend.name, backend.method, 0, 1.0, cost)]
    ended: list[int] = []
    took_s = play(both, predictor, [backend], lambda job, backends, now_s: 0, ended.append)
    shared_s = 200 * 1e-4 + 50 * (0.010 + 2 * 0.001 + 1e-6 * 500)
    assert took_s == pytest.approx(((half_s + shared_s) + (shared_s + 50 * alone(250))) / 2)
    assert ended == [0, 1]
