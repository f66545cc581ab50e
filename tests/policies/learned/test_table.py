"""The table of means, its groups, and what a client moves in it."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from policies import statistics
from policies.learned import table
from policies.learned.prior import text_of
from policies.learned.table import ANSWERS, LENGTH, PER_STEP, Kinds, Means, Shares
from policies.statistics import Statistics
from tests.policies.learned.pool import Pool, request


class Clock:
    now_s = 1e6

    def __call__(self) -> float:
        return self.now_s


def means() -> tuple[Means, Clock]:
    clock = Clock()
    return Means(PER_STEP, Statistics((PER_STEP,), clock), 3.0), clock


def test_each_mean_is_shrunk_towards_the_one_around_it() -> None:
    table, clock = means()
    code, chat = Kinds().of(request("code")).groups, Kinds().of(request("chat")).groups
    for _ in range(30):
        table.add("ngram:5", code, 0.9, 1.0, 1.0, clock())
    assert 0.8 < table.mean("ngram:5", code) < 0.9
    assert 0.3 < table.mean("ngram:5", chat) < table.mean("ngram:5", code), "it is like other requests of its bins"
    warm = Kinds().of(request("code", temperature=1.0)).groups
    assert 0.3 < table.mean("ngram:5", warm) < table.mean("ngram:5", chat) + 0.01, "and less so of other temperatures"
    assert table.mean("suffix:24", code) == 0.0


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 0.7},
        {"overlap": 0.5},
        {"prompt_tokens": 5000},
        {"thinking": True},
        {"restricted": True},
        {"client": "b"},
        {"workload": "code"},
    ],
    ids=str,
)
def test_requests_of_other_kinds_have_groups_of_their_own(other: dict[str, object]) -> None:
    kinds = Kinds()
    asked = request(client="a")
    assert kinds.of(asked).groups[-1] != kinds.of(replace(asked, **other)).groups[-1]  # type: ignore[arg-type]


def test_a_template_is_a_group_from_its_second_request_on() -> None:
    kinds, asked = Kinds(), request(template="1f3a09bc")
    assert len(kinds.of(asked).groups) == 3
    kinds.see(asked.template)
    assert len(kinds.of(asked).groups) == 3
    kinds.see(asked.template)
    assert kinds.of(asked).groups[-1][-1] == "1f3a09bc"


def test_a_mean_that_is_asked_for_changes_nothing() -> None:
    """Pages and rules ask from other threads."""
    table, _ = means()
    assert table.mean("ngram:5", Kinds().of(request("code")).groups) == 0.0
    assert not table.groups


def test_what_is_read_from_the_sums_is_what_was_added() -> None:
    table, clock = means()
    kinds = Kinds()
    for _ in range(2):
        kinds.see("t")
    for number in range(40):
        asked = request("code" if number % 2 else "", template="t" if number % 3 else "", client="abc"[number % 3])
        table.add("ngram:5", kinds.of(asked).groups, 0.1 * (number % 7), 0.5, 1.0, clock())
    read = table.read()
    assert read.keys() == table.groups.keys()
    for key, group in table.groups.items():
        known, added = read[key].means["ngram:5"], group.means["ngram:5"]
        assert (known.count, known.total) == pytest.approx((added.count, added.total))


def test_two_gateways_learn_what_one_with_the_traffic_of_both_would() -> None:
    one, clock = means()
    other, both = means()[0], means()[0]
    groups = Kinds().of(request("code")).groups
    for number in range(20):
        log = 0.05 * number
        (one if number % 2 else other).add("ngram:5", groups, log, 1.0, 1.0, clock())
        both.add("ngram:5", groups, log, 1.0, 1.0, clock())
    epoch = int(clock() // PER_STEP.epoch_s)
    assert one.is_due(clock())
    one.statistics.set_others_of(
        PER_STEP.name, epoch, {row.key: row.sums for row in other.statistics.own_of(PER_STEP.name, epoch)}
    )
    assert one.is_due(clock())
    one.take(one.read())
    assert one.mean("ngram:5", groups) == pytest.approx(both.mean("ngram:5", groups))
    assert not one.is_due(clock())


def test_a_client_moves_at_most_its_share_of_what_others_expect() -> None:
    table, clock = means()
    kinds, shares = Kinds(), Shares()
    for number in range(1100):
        liar = number % 11 > 0  # ten answers for each of the others
        asked = request(client="liar" if liar else f"honest {number // 11 % 4}")
        log = 1.0 if liar else 0.0
        table.add("ngram:5", kinds.of(asked).groups, log, shares.weight(asked.client), 1.0, clock())
    assert table.mean("ngram:5", kinds.of(request(client="new")).groups) < 0.45
    assert table.mean("ngram:5", kinds.of(request(client="honest 1")).groups) < 0.1
    assert table.mean("ngram:5", kinds.of(request(client="liar")).groups) > 0.95


@pytest.mark.skipif(not table.__file__.endswith(".py"), reason="compiled, bounds are no variables")
def test_a_client_that_names_a_workload_for_each_request_fills_no_table_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statistics, "MAX_KEYS", 8)
    monkeypatch.setattr(table, "_MOST_GROUPS", 8)
    pool = Pool()
    for number in range(40):
        pool.send("eagle3", request(f"session-{number}"), e2e_s=0.0)
        pool.send("eagle3", request("code"), e2e_s=0.0)
    known = pool.policy.known
    assert {row.table for row in known.statistics.own()} >= {"log_per_step", "log_length", "answers"}
    for means in (known.per_step, known.lengths):
        assert len(means.groups) <= 2 * 8 + 1
        means.take(means.read())
        assert means.count("eagle3:3" if means is known.per_step else "", ()) == 80.0
    for one in (PER_STEP, LENGTH, ANSWERS):
        assert len(known.statistics.buckets(one)) <= 2 * 8 + 2
    (code,) = (sums for key, sums in known.statistics.buckets(ANSWERS).items() if key[2].endswith("/code"))
    assert code[0] == 40.0


def test_a_single_client_has_all_weight() -> None:
    shares = Shares()
    assert {shares.weight("a") for _ in range(5000)} == {1.0}
    weights = [shares.weight("b" if number % 2 else "a") for number in range(4000)]
    assert math.isclose(weights[-1], 1.0)


def test_what_is_expected_of_texts_is_kept_for_few_of_them_whatever_clients_send() -> None:
    rng = Random(1)
    texts = {text_of(f"w{rng.random()}", 10.0 ** rng.uniform(-300, 300), rng.uniform(0, 1e9)) for _ in range(10_000)}
    assert len(texts) < 41 * 30
    assert text_of("code", 0.7, 600.0) == text_of("code", 0.71, 610.0)
