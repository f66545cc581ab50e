"""The picker under test: where it is, and what the suite has been told of it."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass, field

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .answer import DESTINATION, LB, Answer
from .data_plane import FULL_DUPLEX, Headers, Metadata, Stream

FOREIGN = "203.0.113.9:9"
"""An endpoint of no pool: its address is for documentation."""

STORED = "/v1/responses/resp_0123456789"
"""Where a request without a body goes that a picker is unlikely to answer itself."""

SHED_AFTER = 20
"""Requests after which a picker that sheds must have dropped one."""


@dataclass
class Target:
    """A picker, as `host:port`.

    Attributes
    ----------
    model
        A model that it serves.
    tls_ca
        The authorities, as PEM, that its certificate has to be of; empty for clear text.
    tls_name
        The name in the certificate, if it is not that of the address.
    endpoints
        All endpoints of its pool, as `ip:port`; empty where the suite has not been told.
    headers
        Sent with each request, as a key of the API would be.
    health
        Address of the health service, in clear text; empty if it is that of the picker.
    empty
        A picker and a model without any ready endpoint.
    shed_headers
        With these in place of `headers`, requests are dropped after at most `SHED_AFTER`.
    max_body_bytes
        The largest request body that it takes.
    rewrites_body
        Whether it changes request bodies, so that they are compared as JSON.
    """

    address: str
    model: str
    tls_ca: bytes = b""
    tls_name: str = ""
    endpoints: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    health: str = ""
    empty: tuple[str, str] | None = None
    shed_headers: tuple[tuple[str, str], ...] = ()
    max_body_bytes: int = 0
    rewrites_body: bool = False
    limit_s: float = 5.0
    _channels: dict[str, grpc.Channel] = field(default_factory=dict)
    _seen: tuple[str, ...] = ()

    def _channel(self, address: str) -> grpc.Channel:
        if address not in self._channels:
            options: list[tuple[str, object]] = [("grpc.enable_http_proxy", 0)]
            if self.tls_name:
                options.append(("grpc.ssl_target_name_override", self.tls_name))
            self._channels[address] = (
                grpc.secure_channel(address, grpc.ssl_channel_credentials(self.tls_ca), options)
                if self.tls_ca and address != self.health
                else grpc.insecure_channel(address, options)
            )
        return self._channels[address]

    def connect(self) -> None:
        """Connect to the picker.

        Raises
        ------
        pytest.UsageError
            If it cannot be reached.
        """
        try:
            grpc.channel_ready_future(self._channel(self.address)).result(self.limit_s)
        except grpc.FutureTimeoutError:
            how = "with TLS" if self.tls_ca else "in clear text"
            raise pytest.UsageError(f"no gRPC server {how} answers at {self.address}") from None

    def close(self) -> None:
        """Close all connections."""
        while self._channels:
            self._channels.popitem()[1].close()

    def stream(
        self, *, address: str = "", modes: tuple[int, int] | None = (FULL_DUPLEX, FULL_DUPLEX), observe: bool = False
    ) -> Stream:
        """Open a stream."""
        return Stream(self._channel(address or self.address), self.limit_s, modes, observe)

    def check(self, service: str) -> str:
        """Return the health of a service: a serving status, or the status of gRPC where the call fails."""
        stub = health_pb2_grpc.HealthStub(self._channel(self.health or self.address))
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=self.limit_s)
        except grpc.RpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    def chat(self, content: str = "What is speculative decoding?", **more: object) -> bytes:
        """Return the body of a chat request."""
        messages = [{"role": "user", "content": content}]
        document = {"model": self.model, "messages": messages, "max_tokens": 16, **more}
        return json.dumps(document, ensure_ascii=False).encode()

    def post(
        self,
        body: bytes | None = None,
        *,
        subset: list[str] | None = None,
        headers: Headers | None = None,
        address: str = "",
    ) -> Answer:
        """Return the answer to a request in one piece, whose stream is then cancelled."""
        with self.stream(address=address) as stream:
            self.begin(stream, subset=subset, headers=headers)
            stream.send_body(self.chat() if body is None else body)
            return stream.request()

    def begin(
        self,
        stream: Stream,
        *,
        headers: Headers | None = None,
        subset: list[str] | None = None,
        metadata: Metadata | None = None,
    ) -> None:
        """Send the headers of a request with a body."""
        own = [("content-type", "application/json"), *(self.headers if headers is None else headers)]
        stream.send_headers("/v1/chat/completions", own, subset=subset, metadata=metadata)

    def picked(self, stream: Stream) -> list[str]:
        """Send a whole request, and return the endpoints picked for it."""
        self.begin(stream)
        stream.send_body(self.chat())
        return destinations(stream.request())

    def get(self, path: str, subset: list[str] | None = None) -> Answer:
        """Return the answer to a request without a body."""
        with self.stream() as stream:
            stream.send_headers(path, self.headers, end=True, subset=subset)
            return stream.request()

    def pool(self) -> tuple[str, ...]:
        """Return the endpoints of the pool: those given, or else those that come back for some requests."""
        if not self.endpoints and not self._seen:
            answers = (self.post(self.chat(f"request {number}")) for number in range(20))
            self._seen = tuple(sorted({endpoint for answer in answers for endpoint in destinations(answer)}))
        return self.endpoints or self._seen

    def given_pool(self) -> tuple[str, ...]:
        """Return the endpoints of the pool, and skip the test where they were not given."""
        if not self.endpoints:
            pytest.skip("give --endpoints")
        return self.endpoints

    def two_endpoints(self) -> tuple[str, str]:
        """Return two endpoints of the pool, and skip the test where only one is known."""
        if len(self.pool()) < 2:
            pytest.skip("needs a pool of two endpoints: give --endpoints")
        return self.pool()[0], self.pool()[-1]

    def assert_serves(self) -> None:
        """Check that the picker still picks."""
        destinations(self.post())


def is_endpoint(text: str) -> bool:
    """Whether a text is `ip:port`, with an address of IPv6 in brackets."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        return False
    return (address.version == 6) == bracketed and port.isascii() and port.isdigit() and 0 < int(port) < 65536


def destinations(answer: Answer) -> list[str]:
    """Return the endpoints of an answer, the picked one first.

    Raises
    ------
    AssertionError
        Unless the header and the metadata hold the same valid list.
    """
    values = answer.headers.get(DESTINATION, [])
    assert not answer.immediate, f"expected a pick, got {answer.summary()}"
    assert len(values) == 1, f"expected one header {DESTINATION}, got {values}"
    metadata = answer.metadata.get(LB, {}).get(DESTINATION)
    assert metadata == values[0], f"the header says {values[0]!r}, the metadata of {LB} {metadata!r}"
    endpoints = values[0].split(",")
    wrong = [endpoint for endpoint in endpoints if not is_endpoint(endpoint)]
    assert not wrong, f"not of the form ip:port: {wrong}, in {values[0]!r}"
    return endpoints


def assert_whole(picker: Target, answer: Answer, body: bytes) -> None:
    """Check that a request was given an endpoint, and that its body comes back."""
    destinations(answer)
    if not picker.rewrites_body:
        answer.assert_body(body)
        return
    sent, back = json.loads(body), json.loads(answer.body)
    lost = [name for name in sent if name != "model" and back.get(name) != sent[name]]
    assert not lost, f"changed or lost: {lost}"
