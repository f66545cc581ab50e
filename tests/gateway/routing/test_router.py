"""What the router reads of requests: the models of forms, and sessions where a text does not show what it continues."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.routing.access import read_head
from gateway.routing.keys import ANONYMOUS, Client
from policies.features.request import RequestFeatures
from tests.gateway.relay.test_attempts import Relay


@pytest.mark.parametrize("header", ["", "m"])
def test_the_model_of_a_form_is_read_and_its_bytes_are_sent_on_unchanged(header: str) -> None:
    relay = Relay("a")
    router = relay.context.router
    router._models = {"m": relay.model, "n": relay.model}
    router._only = None
    body = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--x--\r\n'
    headers = [(b"content-type", b"multipart/form-data; boundary=x"), *([(b"x-gateway-model", b"m")] if header else [])]
    _, reply = relay.send(body % b"n", "/v1/audio/transcriptions", headers=headers)
    assert relay.clients["a"].bodies == [body % b"n"]
    for model, status, code in ((b"o", 404, "model_not_found"), (b"", 400, "model_required")):
        if header and not model:
            continue
        _, reply = relay.send(body % model, "/v1/audio/transcriptions", headers=headers)
        assert (reply.status, reply.code) == (status, code)


def test_only_forms_are_read_as_forms() -> None:
    for kind, form in ((b"multipart/form-data; boundary=x", True), (b"application/json", False), (b"", False)):
        head = read_head("POST", ANONYMOUS, "/v1/x", b"/v1/x", [(b"content-type", kind)])
        assert (head.form != "") is form


# Sessions by vLLM's header


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
