"""Requests that are forms go to the model that they name, as OpenAI's client sends them."""

from __future__ import annotations

import openai
import pytest

from gateway.routing.access import read_head
from gateway.routing.keys import ANONYMOUS
from tests.gateway.conftest import MODEL, Start
from tests.gateway.relay.test_attempts import Relay
from tests.support.upstream import Wire


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


async def test_openais_client_transcribes_in_a_pool_of_two_models(gateway_of: Start) -> None:
    async def transcribe(wire: Wire) -> None:
        await wire.json({"text": f"from {wire.upstream.name}"})

    two = {
        name: {
            "policy": {"name": "random"},
            "backends": {name: {"method": "baseline", "url": f"http://127.0.0.1:{port}"}},
        }
        for name, port in ((MODEL, 1), ("other", 2))
    }
    audio = bytes(range(256)) * 4096
    async with gateway_of({MODEL: "baseline"}, models=two, behaviour=transcribe) as running:
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            ask = client.audio.transcriptions.create
            made = await ask(model=MODEL, file=("a.wav", audio))
            assert made.text == f"from {MODEL}"
            seen = running.upstreams[MODEL].seen[-1]
            assert audio in seen.body
            with pytest.raises(openai.NotFoundError):
                await ask(model="unknown", file=("a.wav", audio))
            with pytest.raises(openai.InternalServerError, match="No backend of other"):
                await ask(model="other", file=("a.wav", audio))
