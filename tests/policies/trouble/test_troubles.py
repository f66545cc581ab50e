"""What goes wrong with which requests, against known truth: found, not found, priced, tried again, forgotten."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from backends.backend import Backend
from backends.speculation import Method
from policies.features.request import Endpoint, RequestFeatures
from policies.trouble.troubles import TROUBLE, Troubles

SHAPES = ["tools", "json_schema", "thinking", "tools+thinking", "json_object", "several", "logprobs", "prompt_8k+tools"]
Truth = Callable[[Backend, RequestFeatures], float]


def backend(name: str, method: Method, k: int = 0) -> Backend:
    return Backend(name, "m", method, f"http://127.0.0.1:80{ord(name):03d}", num_speculative_tokens=k)


def pool() -> list[Backend]:
    methods = {"b": (Method.BASELINE, 0), "n": (Method.NGRAM, 5), "e": (Method.MTP, 2), "f": (Method.MTP, 2)}
    return [backend(name, *method) for name, method in methods.items()]


def asking(shape: str, client: str = "") -> RequestFeatures:
    return RequestFeatures("m", Endpoint.CHAT, client=client, shape=tuple(shape.split("+")))


class World:
    """Requests that go wrong with known probabilities, one each tenth of a second."""

    def __init__(self, truth: Truth, seed: int = 0, members: list[Backend] | None = None) -> None:
        self.truth, self.rng, self.now_s = truth, random.Random(seed), 1_000_000.0
        self.troubles, self.pool = Troubles(), members or pool()
        self.troubles.statistics.clock = lambda: self.now_s

    def ask(self, request: RequestFeatures, at: Backend) -> None:
        is_wrong = self.rng.random() < self.truth(at, request)
        self.troubles.observe(request, at, "failed" if is_wrong else "", 2.0)
        self.now_s += 0.1

    def run(self, number: int, shapes: list[str] = SHAPES) -> Iterator[int]:
        for index in range(number):
            request = asking(self.rng.choice(shapes), self.rng.choice("xyz"))
            self.ask(request, self.rng.choice(self.pool))
            if index % 5 == 0:
                self.troubles.refresh()
            yield index


def where(share: float, feature: str, names: str) -> Truth:
    return lambda at, request: share if feature in request.shape and at.name in names else 0.005


@pytest.mark.parametrize(("share", "most"), [(0.5, 25), (7 / 42, 160)])
def test_a_feature_that_breaks_on_an_arm_is_found_by_name(share: float, most: int) -> None:
    for seed in range(5):
        world = World(where(share, "thinking", "ef"), seed)
        asked = 0.0
        for _ in world.run(4000):
            buckets = world.troubles.statistics.buckets(TROUBLE).items()
            asked = sum(sums[0] for key, sums in buckets if key[0] == "mtp:2" and "thinking" in key[2].split("+"))
            if world.troubles.found:
                break
        (found,) = world.troubles.found
        assert (found.shape, found.problem) == (("thinking",), "failed")
        assert found.arm == "mtp:2"
        assert asked <= most


def test_a_clock_that_is_set_back_delays_nothing() -> None:
    world = World(where(0.5, "thinking", "ef"))
    world.troubles.forget("e")
    for _ in world.run(20):
        pass
    world.now_s -= 86_400.0
    for _ in world.run(300, shapes=["thinking"]):
        pass
    (found,) = world.troubles.found
    assert (found.arm, found.backend) == ("mtp:2", "")
    request, is_tried = asking("thinking", "x"), list[bool]()
    for _ in range(2):
        is_tried.append(len(world.troubles.sparing(request, world.pool)) == len(world.pool))
        world.now_s -= 86_400.0
    assert is_tried == [False, True]


def test_one_broken_replica_does_not_condemn_its_arm() -> None:
    world = World(where(0.4, "json_schema", "f"))
    seen = {(each.backend, each.shape) for _ in world.run(3000) for each in world.troubles.found}
    assert seen == {("f", ("json_schema",))}


def test_two_things_that_only_break_together_are_found_as_two() -> None:
    world = World(lambda at, request: 0.5 if at.name in "ef" and len(request.shape) == 2 else 0.005)
    shapes = ["tools", "thinking", "tools+thinking"]
    seen = {each.shape for _ in world.run(1000, shapes=shapes) for each in world.troubles.found}
    assert seen == {("tools", "thinking")}


@pytest.mark.slow
@pytest.mark.parametrize("base", [0.005, 0.2])
def test_what_goes_wrong_everywhere_is_no_trouble(base: float) -> None:
    for seed in range(2):
        world = World(lambda _at, _request: base, seed)
        assert not [index for index in world.run(5_000) if world.troubles.found]


def asked_by(world: World, client: str, problems: list[str], at: Backend, number: int = 60) -> None:
    """Send a client's requests for JSON to a backend, with these outcomes in turn; all other requests succeed there."""
    for index in range(number):
        world.troubles.observe(asking("json_object", client), at, problems[index % len(problems)], 2.0)
        for other in ("x", "y"):
            world.troubles.observe(asking("json_object", other), world.pool[index % len(world.pool)], "", 0.0)
        world.now_s += 1.0
        world.troubles.refresh()


def avoids(world: World, client: str) -> bool:
    """Return whether a client's requests for JSON are kept away from any backend."""
    spared = world.troubles.sparing(asking("json_object", client), world.pool, is_sent=False)
    return len(spared) < len(world.pool)


@pytest.mark.parametrize("problem", ["failed", "stalled", "unusable"])
@pytest.mark.parametrize("pattern", [1, 2, 7])
def test_what_one_client_shows_concerns_its_own_requests_only(problem: str, pattern: int) -> None:
    """Whatever its requests are like, and however many they are: those of others go where they went."""
    world = World(lambda *_: 0.0)
    asked_by(world, "hostile", [problem] + [""] * (pattern - 1), world.pool[2], 400)
    assert {each.client for each in world.troubles.found} == {"hostile"}
    assert avoids(world, "hostile")
    for other in ("x", "y", "never seen", ""):
        assert not avoids(world, other)


def test_what_two_clients_show_concerns_all() -> None:
    world = World(lambda *_: 0.0)
    for _ in range(10):
        asked_by(world, "one", ["unusable", ""], world.pool[2], 6)
        asked_by(world, "two", ["unusable", ""], world.pool[3], 6)
    assert {(each.client, each.arm) for each in world.troubles.found} == {("", "mtp:2")}
    assert avoids(world, "never seen")


def test_no_client_keeps_alive_what_others_no_longer_see() -> None:
    world = found_world()
    for _ in range(30):
        for client, problem in (("x", "failed"), ("y", "")):
            world.troubles.observe(asking("thinking", client), world.pool[2], problem, 2.0)
    world.now_s += 60.0
    world.troubles.refresh()
    assert {each.client for each in world.troubles.found} <= {"x"}


def found_world() -> World:
    world = World(where(0.5, "thinking", "ef"))
    for _ in world.run(2000):
        if [each.client for each in world.troubles.found] == [""]:
            return world
    raise AssertionError("not found")


def test_the_price_is_what_is_lost_and_another_try() -> None:
    world, request = found_world(), asking("thinking")
    found = world.troubles.found[0]
    for _ in range(2):  # asking for an explanation changes nothing
        costs = [1.0, 0.9, 0.5, 0.5]
        world.troubles.price(request, world.pool, costs, is_sent=False)
        assert costs == [1.0, 0.9, *[pytest.approx(0.5 + found.share * (2.0 + 0.5))] * 2]
    costs = [1.0, 0.9, 0.5, 0.5]
    world.troubles.price(asking("tools"), world.pool, costs, is_sent=True)
    assert costs == [1.0, 0.9, 0.5, 0.5]


@pytest.mark.slow
def test_where_nothing_is_safe_nothing_changes() -> None:
    members = [backend(name, Method.EAGLE3, 3) for name in "abcd"]
    world = World(where(0.4, "tools", "abcd"), members=members)
    for _ in world.run(2000):
        pass
    assert world.troubles.found
    costs = [0.4, 0.3, 0.2, 0.1]
    world.troubles.price(asking("tools"), members, costs, is_sent=False)
    assert sorted(costs, reverse=True) == costs
    assert world.troubles.sparing(asking("tools"), members) == members


def test_a_canary_every_five_minutes_finds_out_that_it_works_again() -> None:
    world, request = found_world(), asking("thinking")
    world.truth = lambda _at, _request: 0.0
    canaries = 0
    while world.troubles.found:
        world.now_s += 20.0
        spared = world.troubles.sparing(request, world.pool)
        if len(spared) == len(world.pool):
            canaries += 1
            world.ask(request, world.pool[2])
        else:
            assert [each.name for each in spared] == ["b", "n"]
        world.troubles.refresh()
        assert canaries <= 8
    assert world.now_s < 1_000_000 + 3600


def test_safe_candidates_with_much_more_to_do_are_not_the_only_ones() -> None:
    world, request = found_world(), asking("thinking")
    world.pool[0].in_flight = world.pool[1].in_flight = 12
    world.troubles.sparing(request, world.pool)
    assert world.troubles.sparing(request, world.pool) == world.pool


def test_what_the_engine_before_was_asked_says_nothing_of_the_present_one() -> None:
    world = found_world()
    for name in "ef":
        world.troubles.forget(name)
    world.now_s += 60.0
    for _ in range(50):
        world.troubles.observe(asking("thinking"), world.pool[2], "failed", 2.0, age_s=61.0)
    world.troubles.refresh()
    assert world.troubles.found == ()
    for _ in range(50):
        world.troubles.observe(asking("thinking"), world.pool[2], "failed", 2.0, age_s=59.0)
    world.now_s += 60.0
    world.troubles.refresh()
    assert world.troubles.found


def test_statistics_of_others_may_be_anything() -> None:
    world = found_world()
    epoch = int(world.now_s // TROUBLE.epoch_s)
    others = {("x",): (1.0,) * 5, ("a", "b", "tools", ""): (-9.0,) * 5, ("a", "b", "", "c"): (0.0,) * 5}
    world.troubles.statistics.set_others_of(TROUBLE.name, epoch, others)
    world.now_s += 60.0
    world.troubles.refresh()
    assert world.troubles.found
