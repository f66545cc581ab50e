"""The model of prefix caches: which prefixes are expected where, and how far engines confirm it."""

from __future__ import annotations

import math

import pytest

from policies.features.request import Endpoint, RequestFeatures
from policies.learned.prefix_memory import BackendPrefixes, PrefixMemory


def _sent(*blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return blocks, tuple(100 * (index + 1) for index in range(len(blocks)))


def _request(*blocks: int) -> RequestFeatures:
    return RequestFeatures("m", Endpoint.CHAT, prompt_tokens=1000, prefix=blocks, prefix_tokens=_sent(*blocks)[1])


def _cached(memory: PrefixMemory, backend: BackendPrefixes, *blocks: int) -> float:
    return backend.cached_tokens(_request(*blocks), memory.holders(_request(*blocks)))


@pytest.mark.parametrize("known", range(8))
def test_bisection_finds_every_length(known: int) -> None:
    memory = PrefixMemory()
    backend, full = memory.add_backend(), memory.add_backend()
    backend.remember(*_sent(*range(known)))
    full.remember(*_sent(*range(8)))
    assert _cached(memory, backend, *range(7)) == 100 * min(known, 7)
    assert _cached(memory, full, *range(7)) == 700


def test_trust_falls_without_cache_hits_and_recovers() -> None:
    memory = PrefixMemory()
    missing, hitting = memory.add_backend(), memory.add_backend()
    missing.remember(*_sent(1, 2, 3, 4))
    hitting.remember(*_sent(1, 2, 3, 4))
    for _ in range(60):
        missing.learn(_cached(memory, missing, 1, 2, 3, 4), 0)
        hitting.learn(_cached(memory, hitting, 1, 2, 3, 4), 400)
    assert 0 < _cached(memory, missing, 1, 2, 3, 4) < 0.1 * 400
    assert _cached(memory, hitting, 1, 2, 3, 4) == 400
    for _ in range(200):
        missing.learn(_cached(memory, missing, 1, 2, 3, 4), 400)
    assert _cached(memory, missing, 1, 2, 3, 4) > 0.9 * 400


def test_the_least_recently_used_prefixes_are_forgotten_longest_first() -> None:
    memory = PrefixMemory(max_prefixes=6)
    backend, other = memory.add_backend(), memory.add_backend()
    other.remember(*_sent(1, 2, 3, 4))
    backend.remember(*_sent(1, 2, 3, 4))
    backend.remember(*_sent(5, 6, 7, 8))
    assert _cached(memory, backend, 5, 6, 7, 8) == 400
    assert _cached(memory, backend, 1, 2, 3, 4) == 200
    backend.remember(*_sent(1, 2))
    backend.remember(*_sent(11, 12))
    assert _cached(memory, backend, 1, 2, 3, 4) == 200
    assert _cached(memory, backend, 5, 6, 7, 8) == 200
    assert _cached(memory, other, 1, 2, 3, 4) == 400, "each backend forgets independently"


def test_prefixes_without_holders_are_removed() -> None:
    memory = PrefixMemory(max_prefixes=10)
    backends = [memory.add_backend() for _ in range(3)]
    for number in range(1000):
        backends[number % 3].remember(*_sent(number % 7, 1000 + number, 10_000 + number))
    held = {prefix for backend in backends for prefix in backend._used}
    assert set(memory._holders) == held
    assert len(held) <= 30
    for prefix, holders in memory._holders.items():
        assert holders == sum(1 << index for index in range(3) if prefix in backends[index]._used)


def test_a_cache_forgets_by_tokens_longest_first() -> None:
    memory = PrefixMemory()
    backend = memory.add_backend()
    backend.resize(600)
    backend.remember(*_sent(1, 2, 3, 4))
    backend.remember(*_sent(5, 6, 7))
    assert _cached(memory, backend, 1, 2, 3, 4) == 300
    assert _cached(memory, backend, 5, 6, 7) == 300
    assert (backend.recomputed(0, 0.0), backend.recomputed(1, 0.0)) == (0.0, pytest.approx(2.0))
    backend.resize(200)
    assert (_cached(memory, backend, 1, 2, 3, 4), _cached(memory, backend, 5, 6, 7)) == (0, 200)
    backend.resize(0)  # not known
    for number in range(10, 50):
        backend.remember(*_sent(number, number + 100))
    assert _cached(memory, backend, 5, 6, 7) == 200


def test_what_is_asked_for_again_within_a_minute_is_dear_to_evict_for_a_minute() -> None:
    """One conversation after another, a request every 40 s, each of 8 requests: the rest is never asked for again."""
    memory = PrefixMemory()
    backend = memory.add_backend()
    backend.resize(1000)
    now_s = 0.0
    for conversation in range(60):
        for turn in range(1, 9):
            now_s += 40.0
            backend.remember(*_sent(*range(100 * conversation, 100 * conversation + turn)), now_s)
    young, old = backend._reuse.recomputed(10.0), backend._reuse.recomputed(200.0)
    assert young > 2.0 > 1.0 > old > 0.0
    assert backend.recomputed(300, now_s) == pytest.approx(backend._reuse.recomputed(320.0), abs=0.01)
    assert backend.recomputed(0, now_s) == 0.0


def test_what_was_not_used_since_an_eviction_is_gone_and_what_does_not_fit() -> None:
    memory = PrefixMemory()
    backend = memory.add_backend()
    backend.resize(900)
    backend.evicted(-math.inf, is_full=False)
    for number, now_s in ((1, 10.0), (5, 20.0), (9, 30.0)):
        backend.remember(*_sent(number, number + 1, number + 2), now_s)
    assert (_cached(memory, backend, 1, 2, 3), backend.goes_by) == (300, "events")
    backend.evicted(20.0, is_full=True)
    assert [_cached(memory, backend, each, each + 1, each + 2) for each in (1, 5, 9)] == [0, 300, 300]
    assert backend.recomputed(1.0, 40.0) > 0.0
    backend.evicted(20.0, is_full=False)
    assert backend.recomputed(1e6, 40.0) == 0.0
    backend.remember(*_sent(5, 6), 40.0)
    backend.evicted(35.0, is_full=True)
    assert [_cached(memory, backend, each, each + 1, each + 2) for each in (5, 9)] == [200, 0]
    backend.resize(300)
    backend.remember(*_sent(11, 12, 13), 50.0)
    assert [_cached(memory, backend, each, each + 1, each + 2) for each in (5, 11)] == [0, 300]
    backend.evicted(None, is_full=False)
    assert backend.goes_by == "estimate"
