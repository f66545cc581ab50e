from __future__ import annotations

from typing import Any

from policies.features.request import Endpoint, RequestFeatures, describe

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


def test_requests_of_an_application_share_only_their_system_prompt() -> None:
    first, second = (
        features_of({"role": "user", "content": "Summarise."}),
        features_of({"role": "user", "content": "Translate."}),
    )
    assert first.prefix[0] == second.prefix[0]
    assert first.prefix[1] != second.prefix[1]


def test_a_short_prompt_has_no_prefixes() -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    features = describe(Endpoint.CHAT, body, model="m", default_temperature=1.0, qps=0.0, in_flight=0)
    assert features.prefix == ()
