"""Sessions by vLLM's header: they count where the text of a prompt does not show what it continues."""

from __future__ import annotations

import json
from typing import Any

from gateway.routing.access import read_head
from gateway.routing.keys import Client
from policies.features.request import RequestFeatures
from tests.gateway.relay.test_attempts import Relay

LONG = "a text that both have at their beginning " * 20
ALICE, BOB = Client("alice", id="1"), Client("bob", id="2")


def features(relay: Relay, session: str, client: Client = ALICE, **prompt: Any) -> RequestFeatures:
    path = "/v1/completions" if "prompt" in prompt else "/v1/chat/completions"
    head = read_head("POST", client, path, path.encode(), [(b"x-session-id", session.encode())] if session else [])
    return relay.context.router.route(head, json.dumps({"model": "m", **prompt}).encode(), 0.0).features


def test_the_prompts_of_a_session_continue_each_other_where_their_text_does_not_show_it() -> None:
    relay = Relay("a", "b", policy={"name": "lmetric"})
    one, two = (features(relay, "s1", prompt=[7] * count) for count in (400, 900))
    assert one.prefix == two.prefix != ()
    assert (one.prefix_tokens, two.prefix_tokens) == ((400,), (900,))
    assert features(relay, "s2", prompt=[7] * 400).prefix != one.prefix
    assert features(relay, "s1", BOB, prompt=[7] * 400).prefix != one.prefix, "a session is of one client"
    assert features(relay, "", prompt=[7] * 400).prefix == ()
    messages = [{"role": "user", "content": LONG}]
    assert features(relay, "s1", messages=messages).prefix == features(relay, "", messages=messages).prefix
