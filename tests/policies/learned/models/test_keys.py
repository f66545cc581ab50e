"""Which templates are told apart: those that have come again."""

from __future__ import annotations

from dataclasses import replace

from backends.backend import Backend
from backends.speculation import Method
from benchmarks.routing.learned_rows import set_others
from policies.features.request import Endpoint, RequestFeatures, describe
from policies.learned.models.keys import REQUESTS, TEMPLATE, Templates, template_of_client
from policies.learned.models.length import LENGTH
from policies.learned.policy import Learned, LearnedSettings
from policies.policy import Outcome
from tests.support.simulated import fit


def chat(*texts: str, system: str = "") -> RequestFeatures:
    roles = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]
    body = {"messages": [*([{"role": "system", "content": system}] if system else []), *roles]}
    return describe(Endpoint.CHAT, body, model="m", default_temperature=0.0, qps=0.0, in_flight=0)


def token_ids(*ids: int) -> RequestFeatures:
    body = {"prompt": list(ids)}
    return describe(Endpoint.COMPLETIONS, body, model="m", default_temperature=0.0, qps=0.0, in_flight=0)


def known(templates: Templates, request: RequestFeatures) -> bool:
    assert request.template
    return bool(templates.key(request, counts=False)[TEMPLATE])


def test_prompts_with_the_same_head_make_a_template() -> None:
    templates = Templates()
    for number in range(REQUESTS):
        request = chat("Translate into French:\n" + "word " * (10 + number))
        assert not known(templates, request)
        templates.key(request)
    assert known(templates, chat("Translate into French:\nsomething else"))
    ids = [token_ids(*range(40), *range(number)) for number in range(REQUESTS)]
    for request in ids:
        assert not known(templates, request)
        templates.key(request)
    assert known(templates, ids[0])


def test_templates_of_the_statistics_are_known() -> None:
    templates, request = Templates(), chat("Be nice to me.", system="You are helpful.")
    templates.learn(frozenset({request.template}))
    assert known(templates, request)


def test_what_is_counted_and_known_has_a_bound() -> None:
    templates = Templates(most=8)
    for number in range(100):
        for _ in range(REQUESTS if number % 2 else 1):
            templates.key(RequestFeatures("m", Endpoint.CHAT, template=f"{number:08x}"))
    assert len(templates._known) == 8
    assert len(templates._counted) <= 8
    assert f"{99:08x}" in templates._known


def test_one_off_prompts_do_not_fill_the_statistics() -> None:
    policy = Learned(LearnedSettings(seed=0))
    pool = [Backend("b", "m", Method.BASELINE, "http://127.0.0.1:1")]

    def serve(request: RequestFeatures) -> None:
        decision = policy.choose(request, pool)
        policy.observe(Outcome(request, decision, Method.BASELINE, 200, 0.1, 0.01, 1.0, 50, 90, 1.0))

    for number in range(60):
        serve(chat(f"Question {number}: what is it?"))
    for number in range(60):
        serve(chat("Tell me. " * (number + 1), system="You are helpful."))
    counts: dict[str, float] = {}
    for key, sums in policy.statistics.buckets(LENGTH).items():
        counts[key[TEMPLATE]] = counts.get(key[TEMPLATE], 0.0) + sums[0]
    assert len(counts) == 2
    assert sorted(map(round, counts.values())) == [60 - REQUESTS + 1, 60 + REQUESTS - 1]
    fresh = Learned(LearnedSettings(seed=0))
    set_others(fresh.statistics, policy.statistics.own())
    fit(fresh)
    request = chat("Tell me.", system="You are helpful.")
    fresh.choose(request, pool)  # takes over the fit
    assert known(fresh.templates, request)
    assert not known(fresh.templates, chat("Question 3: what is it?"))


def test_what_has_no_template_is_learned_by_client() -> None:
    templates = Templates()

    def template(client: str, text: str) -> str:
        return templates.key(replace(chat(text), client=client))[TEMPLATE]

    assert [template("one", f"{number} is a question") for number in range(3)] == ["", *[template_of_client("one")] * 2]
    assert template("two", "another question") == ""
    assert {template("", f"{number} is a third question") for number in range(3)} == {""}
    assert [template("one", "again and again") for _ in range(2)][1] == chat("again and again").template
