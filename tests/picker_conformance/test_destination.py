"""Where a request goes: the header, the metadata, and who may choose."""

from __future__ import annotations

import contextlib

from .answer import DESTINATION
from .requirement import Source, must, should
from .target import FOREIGN, Target, assert_whole, destinations

CONCURRENT = 50


@must(
    Source.DESTINATION,
    "The picked endpoint is in the header x-gateway-destination-endpoint and, equally, in the dynamic metadata under "
    "envoy.lb, as ip:port, or ip:port,ip:port,... with fallbacks.",
)
def test_header(picker: Target) -> None:
    for _ in range(5):
        destinations(picker.post())


@should(
    Source.USERS, "A fallback is not an endpoint that has been tried already: no endpoint comes twice in the value."
)
def test_no_endpoint_comes_twice(picker: Target) -> None:
    picked = destinations(picker.post())
    assert len(picked) == len(set(picked)), f"one comes twice: {picked}"


@must(Source.DESTINATION, "Without a subset, the endpoints are of the pool.")
def test_pool(picker: Target) -> None:
    picked = {endpoint for _ in range(10) for endpoint in destinations(picker.post())}
    assert picked <= set(picker.given_pool()), f"not of the pool: {picked - set(picker.given_pool())}"


@must(Source.DESTINATION, "Each of 50 requests at once gets an endpoint of the pool, and keeps its own body.")
def test_many_at_once(picker: Target) -> None:
    bodies = [picker.chat(f"request {number}") for number in range(CONCURRENT)]
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(picker.stream()) for _ in bodies]
        for stream in streams:
            picker.begin(stream)
        for stream, body in zip(streams, bodies, strict=True):
            stream.send_body(body[:50], end=False)
        for stream, body in reversed(list(zip(streams, bodies, strict=True))):
            stream.send_body(body[50:])
        for stream, body in zip(streams, bodies, strict=True):
            answer = stream.request()
            assert_whole(picker, answer, body)
            assert set(destinations(answer)) <= set(picker.endpoints or destinations(answer)), answer.summary()


@must(Source.DESTINATION, "A destination that the client has sent itself is overwritten.")
def test_client_does_not_choose(picker: Target) -> None:
    answer = picker.post(headers=[*picker.headers, (DESTINATION, FOREIGN)])
    if not answer.immediate:
        assert FOREIGN not in destinations(answer)


@must(Source.EXT_PROC, "The picker ends its side of the stream when the data plane has ended its own.")
def test_end_of_the_stream(picker: Target) -> None:
    with picker.stream() as stream:
        picker.picked(stream)
        stream.close()
        code, _ = stream.until_end()
        assert code.name == "OK", f"the stream ended with {code.name}"
