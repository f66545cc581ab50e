from __future__ import annotations

from typing import Any

from policies.features.request import Endpoint, RequestFeatures, describe

SYSTEM = {"role": "system", "content": "You review contracts. " * 20}


def seen(*messages: dict[str, Any]) -> RequestFeatures:
    body = {"messages": [SYSTEM, *messages]}
    return describe(Endpoint.CHAT, body, model="m", default_temperature=1.0, qps=0.0, in_flight=0)


def test_a_conversation_that_goes_on_begins_as_it_began() -> None:
    first = seen({"role": "user", "content": "What does clause 4 say? " * 10})
    later = seen(
        {"role": "user", "content": "What does clause 4 say? " * 10},
        {"role": "assistant", "content": "It limits liability. " * 10},
        {"role": "user", "content": "And clause 5?"},
    )
    assert later.prefix[: len(first.prefix)] == first.prefix
    assert len(later.prefix) == len(first.prefix) + 2
    assert list(later.prefix_tokens) == sorted(later.prefix_tokens)


def test_requests_of_one_application_share_their_system_prompt_only() -> None:
    one, other = seen({"role": "user", "content": "Summarise."}), seen({"role": "user", "content": "Translate."})
    assert one.prefix[0] == other.prefix[0]
    assert one.prefix[1] != other.prefix[1]


def test_a_short_prompt_has_nothing_worth_caching() -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    features = describe(Endpoint.CHAT, body, model="m", default_temperature=1.0, qps=0.0, in_flight=0)
    assert features.prefix == ()
