"""What a prefix cache should hold is believed as far as the engine bears it out."""

from __future__ import annotations

import pytest

from policies.features.request import Endpoint, RequestFeatures
from policies.learned.models.prefix_memory import BackendPrefixes, PrefixMemory


def _request(*blocks: int) -> RequestFeatures:
    lengths = tuple(100 * (place + 1) for place in range(len(blocks)))
    return RequestFeatures("m", Endpoint.CHAT, prompt_tokens=1000, prefix=blocks, prefix_tokens=lengths)


def _cached(memory: PrefixMemory, backend: BackendPrefixes, *blocks: int) -> float:
    return backend.cached_tokens(_request(*blocks), memory.holders(_request(*blocks)))


def test_the_longest_beginning_that_was_sent_there_counts() -> None:
    memory = PrefixMemory()
    one, other = memory.of_another_backend(), memory.of_another_backend()
    assert _cached(memory, one, 1, 2, 3, 4) == 0
    one.remember(_request(1, 2, 3, 4))
    other.remember(_request(1, 2, 8))
    assert _cached(memory, one, 1, 2, 3, 4) == 400
    assert _cached(memory, one, 1, 2, 9, 10) == 200
    assert _cached(memory, one, 1, 2, 8) == 200
    assert _cached(memory, one, 9, 10, 11) == 0
    assert _cached(memory, one) == 0
    assert _cached(memory, other, 1, 2, 3, 4) == 200
    assert _cached(memory, other, 1, 2, 8) == 300
    assert _cached(memory, memory.of_another_backend(), 1, 2, 8) == 0


@pytest.mark.parametrize("known", range(8))
def test_halving_finds_every_length(known: int) -> None:
    memory = PrefixMemory()
    backend, whole = memory.of_another_backend(), memory.of_another_backend()
    backend.remember(_request(*range(known)))
    whole.remember(_request(*range(8)))
    assert _cached(memory, backend, *range(7)) == 100 * min(known, 7)
    assert _cached(memory, whole, *range(7)) == 700


def test_trust_falls_where_the_engine_finds_nothing_and_comes_back() -> None:
    memory = PrefixMemory()
    nothing, everything = memory.of_another_backend(), memory.of_another_backend()
    nothing.remember(_request(1, 2, 3, 4))
    everything.remember(_request(1, 2, 3, 4))
    for _ in range(60):
        nothing.learn(_cached(memory, nothing, 1, 2, 3, 4), 0)
        everything.learn(_cached(memory, everything, 1, 2, 3, 4), 400)
    assert 0 < _cached(memory, nothing, 1, 2, 3, 4) < 0.1 * 400
    assert _cached(memory, everything, 1, 2, 3, 4) == 400
    for _ in range(200):
        nothing.learn(_cached(memory, nothing, 1, 2, 3, 4), 400)
    assert _cached(memory, nothing, 1, 2, 3, 4) > 0.9 * 400


def test_a_short_prefix_teaches_nothing() -> None:
    memory = PrefixMemory()
    backend = memory.of_another_backend()
    backend.remember(_request(1, 2))
    backend.learn(5.0, 0)
    backend.learn(0.0, 0)
    assert _cached(memory, backend, 1, 2) == 200


def test_what_was_used_longest_ago_is_forgotten_from_its_end() -> None:
    memory = PrefixMemory(most=6)
    backend, other = memory.of_another_backend(), memory.of_another_backend()
    other.remember(_request(1, 2, 3, 4))
    backend.remember(_request(1, 2, 3, 4))
    backend.remember(_request(5, 6, 7, 8))
    assert _cached(memory, backend, 5, 6, 7, 8) == 400
    assert _cached(memory, backend, 1, 2, 3, 4) == 200
    backend.remember(_request(1, 2))
    backend.remember(_request(11, 12))
    assert _cached(memory, backend, 1, 2, 3, 4) == 200
    assert _cached(memory, backend, 5, 6, 7, 8) == 200
    assert _cached(memory, other, 1, 2, 3, 4) == 400, "each backend forgets for itself"


def test_what_nobody_holds_takes_no_memory() -> None:
    memory = PrefixMemory(most=10)
    backends = [memory.of_another_backend() for _ in range(3)]
    for number in range(1000):
        backends[number % 3].remember(_request(number % 7, 1000 + number, 10_000 + number))
    held = {beginning for backend in backends for beginning in backend._used}
    assert set(memory._holders) == held
    assert len(held) <= 30
    for beginning, holders in memory._holders.items():
        assert holders == sum(1 << place for place in range(3) if beginning in backends[place]._used)


def test_a_rehearsal_knows_the_same_and_remembers_nothing() -> None:
    memory = PrefixMemory()
    backend = memory.of_another_backend()
    backend.remember(_request(1, 2))
    rehearsed, dry_run_copy = memory.dry_run_copy(), backend.dry_run_copy()
    for one in (dry_run_copy, rehearsed.of_another_backend()):
        one.remember(_request(5, 6))
        assert _cached(rehearsed, one, 5, 6) == _cached(memory, backend, 5, 6) == 0
    assert _cached(rehearsed, dry_run_copy, 1, 2) == _cached(memory, backend, 1, 2) == 200
