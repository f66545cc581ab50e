"""What a prefix cache should hold is believed as far as the engine bears it out."""

from __future__ import annotations

import pytest

from policies.prefixes import PrefixMemory
from policies.request import Endpoint, RequestFeatures


def _request(*blocks: int) -> RequestFeatures:
    lengths = tuple(100 * (place + 1) for place in range(len(blocks)))
    return RequestFeatures("m", Endpoint.CHAT, prompt_tokens=1000, prefix=blocks, prefix_tokens=lengths)


def test_the_longest_beginning_that_was_sent_there_counts() -> None:
    memory = PrefixMemory()
    assert memory.cached_tokens(_request(1, 2, 3, 4)) == 0
    memory.remember(_request(1, 2, 3, 4))
    assert memory.cached_tokens(_request(1, 2, 3, 4)) == 400
    assert memory.cached_tokens(_request(1, 2, 9, 10)) == 200
    assert memory.cached_tokens(_request(9, 10, 11)) == 0
    assert memory.cached_tokens(_request()) == 0


@pytest.mark.parametrize("known", range(8))
def test_halving_finds_every_length(known: int) -> None:
    memory = PrefixMemory()
    memory.remember(_request(*range(known)))
    assert memory.cached_tokens(_request(*range(7))) == 100 * min(known, 7)


def test_trust_falls_where_the_engine_finds_nothing_and_comes_back() -> None:
    nothing, all_of_it = PrefixMemory(), PrefixMemory()
    request = _request(1, 2, 3, 4)
    nothing.remember(request)
    all_of_it.remember(request)
    for _ in range(60):
        nothing.learn(nothing.cached_tokens(request), 0)
        all_of_it.learn(all_of_it.cached_tokens(request), 400)
    distrusted = nothing.cached_tokens(request)
    assert 0 < distrusted < 0.1 * 400
    assert all_of_it.cached_tokens(request) == 400
    for _ in range(200):
        nothing.learn(nothing.cached_tokens(request), 400)
    assert nothing.cached_tokens(request) > 0.9 * 400


def test_a_short_prefix_teaches_nothing() -> None:
    memory = PrefixMemory()
    request = _request(1, 2)
    memory.remember(request)
    memory.learn(5.0, 0)
    memory.learn(0.0, 0)
    assert memory.cached_tokens(request) == 200


def test_what_was_used_longest_ago_is_forgotten_from_its_end() -> None:
    memory = PrefixMemory(most=6)
    memory.remember(_request(1, 2, 3, 4))
    memory.remember(_request(5, 6, 7, 8))
    assert memory.cached_tokens(_request(5, 6, 7, 8)) == 400
    assert memory.cached_tokens(_request(1, 2, 3, 4)) == 200
    memory.remember(_request(1, 2))
    memory.remember(_request(11, 12))
    assert memory.cached_tokens(_request(1, 2, 3, 4)) == 200
    assert memory.cached_tokens(_request(5, 6, 7, 8)) == 200


def test_a_rehearsal_knows_the_same_and_remembers_nothing() -> None:
    memory = PrefixMemory()
    memory.remember(_request(1, 2))
    rehearsal = memory.rehearsal()
    rehearsal.remember(_request(5, 6))
    assert rehearsal.cached_tokens(_request(1, 2)) == memory.cached_tokens(_request(1, 2)) == 200
    assert rehearsal.cached_tokens(_request(5, 6)) == memory.cached_tokens(_request(5, 6)) == 0
