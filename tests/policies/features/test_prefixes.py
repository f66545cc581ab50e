from __future__ import annotations

from typing import Any

import pytest

from policies.features.prompt import TAIL_CHARS, Prompt, prefix_hashes
from policies.features.request import Endpoint, RequestFeatures, describe
from policies.learned.prefix_memory import PrefixMemory

SYSTEM = {"role": "system", "content": "You review contracts. " * 20}


def features_of(*messages: dict[str, Any]) -> RequestFeatures:
    body = {"messages": [SYSTEM, *messages]}
    return describe(Endpoint.CHAT, body, model="m", default_temperature=1.0, qps=0.0, in_flight=0)


def test_a_continued_conversation_keeps_its_prefixes() -> None:
    first = features_of({"role": "user", "content": "What does clause 4 say? " * 10})
    later = features_of(
        {"role": "user", "content": "What does clause 4 say? " * 10},
        {"role": "assistant", "content": "It limits liability. " * 10},
        {"role": "user", "content": "And clause 5?"},
    )
    assert later.prefix[: len(first.prefix)] == first.prefix
    assert len(later.prefix) == len(first.prefix) + 2
    assert list(later.prefix_tokens) == sorted(later.prefix_tokens)


def test_prefixes_are_the_same_in_every_process() -> None:
    hashes, _ = prefix_hashes(Prompt([40 * each for each in ("one", "zwei \u00e9 \ud800", "three")]))
    assert hashes == (-4679683291254268335, -2058829981854078956, 5229809699452863538)


def test_a_short_prompt_has_no_prefixes() -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    features = describe(Endpoint.CHAT, body, model="m", default_temperature=1.0, qps=0.0, in_flight=0)
    assert features.prefix == ()


def _long(count: int) -> RequestFeatures:
    texts = [f"text {number} of a conversation that grows, " * 8 for number in range(count)]
    return features_of(*[{"role": "user", "content": text} for text in texts])


@pytest.mark.parametrize("later", [2, 20, 60])
def test_a_long_conversation_is_found_where_it_was_served(later: int) -> None:
    memory = PrefixMemory()
    backend, other = memory.add_backend(), memory.add_backend()
    first, second = _long(300), _long(300 + later)
    backend.remember(first.prefix, first.prefix_tokens)
    few = _long(40)
    other.remember(few.prefix, few.prefix_tokens)
    assert len(second.prefix) <= 64
    assert backend.cached_tokens(second, memory.holders(second)) > 0.95 * first.prefix_tokens[-1]
    assert other.cached_tokens(second, memory.holders(second)) < 0.2 * first.prefix_tokens[-1]
    assert list(second.prefix_tokens) == sorted(set(second.prefix_tokens))


def test_the_tail_of_a_prompt_is_the_end_of_all_its_texts() -> None:
    texts = ["x" * 5000, "and now", "translate this:"]
    assert Prompt(texts).tail() == "\n".join(texts)[-TAIL_CHARS:]
    assert Prompt(texts[1:]).tail() == "and now\ntranslate this:"
