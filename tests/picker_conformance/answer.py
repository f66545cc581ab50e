"""What a picker makes of a request or of an answer, read as Envoy reads it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from gateway.rooms.picker import ext_proc_pb2 as ext_proc

DESTINATION = "x-gateway-destination-endpoint"
LB = "envoy.lb"
"""Namespace of the metadata, as the protocol has it by default."""

_ACTION = ext_proc.HeaderValueOption.HeaderAppendAction


@dataclass
class Answer:
    """What came back for a request, or for the answer to one: headers, pieces of the body, trailers.

    Attributes
    ----------
    side
        `request` or `response`.
    sent
        The headers that were sent.
    headers
        The headers after the picker's changes, with names in lower case.
    metadata
        The dynamic metadata that came with the headers, by namespace.
    pieces
        The length of each piece of the body in bytes.
    ended
        Whether a piece said that it is the last.
    immediate
        HTTP status of an immediate response; 0 if there was none.
    message
        Body of the immediate response.
    """

    side: str
    sent: list[tuple[str, str]]
    headers: dict[str, list[str]] = field(default_factory=dict)
    metadata: dict[str, dict[str, object]] = field(default_factory=dict)
    body: bytes = b""
    pieces: list[int] = field(default_factory=list)
    has_headers: bool = False
    ended: bool = False
    has_trailers: bool = False
    immediate: int = 0
    message: bytes = b""

    def summary(self) -> str:
        """Describe the answer, for the message of a failed test."""
        if self.immediate:
            return f"an immediate response with {self.immediate}: {self.message[:200]!r}"
        return f"the destination {self.headers.get(DESTINATION)}, and {len(self.body)} bytes of body"

    def assert_body(self, body: bytes) -> None:
        """Check that a body came back as it was.

        pytest's own comparison takes hours for long bodies that differ in a byte, where the variable `CI` is set.

        Raises
        ------
        AssertionError
            If it did not. It says from which byte on.
        """
        if self.body != body:
            shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.body, body, strict=False))
            start = sum(1 for _ in shared)
            back, sent = self.body[start : start + 32], body[start : start + 32]
            raise AssertionError(
                f"{len(self.body)} bytes came back of {len(body)}; from byte {start} on {back!r} instead of {sent!r}"
            )

    def take(self, message: ext_proc.ProcessingResponse) -> None:
        """Add a message of the picker.

        Raises
        ------
        AssertionError
            If it is out of order. The order is headers, body, trailers.
        """
        kind = message.WhichOneof("response")
        if kind == "immediate_response":
            self.immediate = message.immediate_response.status.code
            self.message = message.immediate_response.body
        elif kind == f"{self.side}_headers":
            self._take_headers(message)
        elif kind == f"{self.side}_body":
            self._take_piece(getattr(message, kind).response.body_mutation)
        elif kind == f"{self.side}_trailers":
            assert self.has_headers, f"the {self.side} trailers were answered before its headers"
            self.has_trailers = True
        else:
            raise AssertionError(f"the picker sent {kind} while the {self.side} was under way")

    def _take_headers(self, message: ext_proc.ProcessingResponse) -> None:
        assert not self.has_headers, f"the picker answered the {self.side} headers twice"
        self.has_headers = True
        common = getattr(message, f"{self.side}_headers").response
        self.headers = changed_headers(self.sent, common.header_mutation)
        self.metadata = {
            name: dict(value.struct_value.items())
            for name, value in message.dynamic_metadata.fields.items()
            if value.HasField("struct_value")
        }

    def _take_piece(self, mutation: ext_proc.BodyMutation) -> None:
        what = f"a piece of the {self.side} body"
        assert self.has_headers, f"{what} came before the answer to its headers"
        assert not self.ended, f"{what} came after the one with end_of_stream"
        assert not self.has_trailers, f"{what} came after its trailers"
        kind = mutation.WhichOneof("mutation")
        assert kind == "streamed_response", f"{what} is not a streamed_response but {kind}, in FULL_DUPLEX_STREAMED"
        self.body += mutation.streamed_response.body
        self.pieces.append(len(mutation.streamed_response.body))
        self.ended = mutation.streamed_response.end_of_stream


def changed_headers(headers: list[tuple[str, str]], mutation: ext_proc.HeaderMutation) -> dict[str, list[str]]:
    """Apply a picker's changes to headers as Envoy's ext_proc does: first what is removed, then what is set.

    A header is replaced unless `append` or `append_action` says otherwise; the default of `append_action` counts as not
    set, as it does in Envoy.
    """
    changed: dict[str, list[str]] = {}
    for name, value in headers:
        changed.setdefault(name.lower(), []).append(value)
    for name in mutation.remove_headers:
        changed.pop(name.lower(), None)
    for option in mutation.set_headers:
        name = option.header.key.lower()
        assert not option.header.value, f"{name} is set in value; ext_proc has the values of headers in raw_value"
        value = option.header.raw_value.decode()
        if option.append.value:
            changed.setdefault(name, []).append(value)
        elif option.append_action == _ACTION.ADD_IF_ABSENT:
            changed.setdefault(name, [value])
        elif option.append_action != _ACTION.OVERWRITE_IF_EXISTS or name in changed:
            changed[name] = [value]
    return changed
