"""Requests that are forms go to the model that they name, as OpenAI's client sends them."""

from __future__ import annotations

import pytest

from gateway.routing.access import read_head
from gateway.routing.keys import ANONYMOUS
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
