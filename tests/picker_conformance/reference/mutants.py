"""The reference picker, broken in one respect each time: what the suite has to notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import grpc

from .. import ext_proc_pb2 as ext_proc
from ..ext_proc_pb2 import ProcessingRequest as Request
from ..ext_proc_pb2 import ProcessingResponse as Response
from .picker import DESTINATION, SUBSET, Picker

ADD_IF_ABSENT = ext_proc.HeaderValueOption.HeaderAppendAction.ADD_IF_ABSENT


class Mutant(Picker):
    """A picker that mishears what it is sent, or is misheard."""

    def hears(self, message: Request) -> list[Request]:
        return [message]

    def says(self, response: Response) -> list[Response]:
        return [response]

    async def Process(
        self, requests: AsyncIterator[Request], context: grpc.aio.ServicerContext[Request, Response]
    ) -> AsyncIterator[Response]:
        async def heard() -> AsyncIterator[Request]:
            async for message in requests:
                for each in self.hears(message):
                    yield each

        async for response in super().Process(heard(), context):
            for each in self.says(response):
                yield each


def deaf_to(kind: str, which: Callable[[Request], bool] = lambda message: True) -> type[Picker]:
    """Return a picker that ignores some messages of a kind."""

    class Deaf(Mutant):
        def hears(self, message: Request) -> list[Request]:
            return [] if message.WhichOneof("request") == kind and which(message) else [message]

    return Deaf


def says_wrongly(kind: str, change: Callable[[Response], object]) -> type[Picker]:
    """Return a picker that gets messages of a kind wrong."""

    class Wrong(Mutant):
        def says(self, response: Response) -> list[Response]:
            if response.WhichOneof("response") == kind:
                change(response)
            return [response]

    return Wrong


def hears_wrongly(kind: str, change: Callable[[Request], object]) -> type[Picker]:
    """Return a picker that misunderstands messages of a kind."""

    class Wrong(Mutant):
        def hears(self, message: Request) -> list[Request]:
            if message.WhichOneof("request") == kind:
                change(message)
            return [message]

    return Wrong


def destination(change: Callable[[str], str]) -> type[Picker]:
    """Return a picker with another destination, in the header and in the metadata."""

    def changed(response: Response) -> None:
        option = header(response)
        value = change(option.header.raw_value.decode())
        option.header.raw_value = value.encode()
        response.dynamic_metadata.update({"envoy.lb": {DESTINATION: value}})

    return says_wrongly("request_headers", changed)


def header(response: Response, number: int = 0) -> ext_proc.HeaderValueOption:
    """Return a header that a pick sets: the destination, or the length of the body."""
    return response.request_headers.response.header_mutation.set_headers[number]


def in_value(response: Response) -> None:
    """Move the destination to the field that is not for values of headers."""
    option = header(response)
    option.header.value = option.header.raw_value.decode()
    option.header.raw_value = b""


def streamed(response: Response) -> ext_proc.StreamedBodyResponse:
    """Return the piece of a body that a response holds."""
    part = response.request_body if response.HasField("request_body") else response.response_body
    return part.response.body_mutation.streamed_response


def loses_a_byte(response: Response) -> None:
    streamed(response).body = streamed(response).body[:-1]


def wrong_length(response: Response) -> None:
    if len(response.request_headers.response.header_mutation.set_headers) > 1:
        header(response, 1).header.raw_value = b"1"


def replaces_halves(message: Request) -> None:
    """Decode each piece of a body by itself."""
    message.request_body.body = message.request_body.body.decode(errors="replace").encode()


class WithoutSubset(Picker):
    """Picks from the whole pool, whatever the subset."""

    def candidates(self, head: Request) -> list[str]:
        return self.endpoints


class EmptyIsAll(Picker):
    """Takes an empty subset for none."""

    def candidates(self, head: Request) -> list[str]:
        return super().candidates(head) if subset_of(head) else self.endpoints


class OnlySubset(Picker):
    """Picks nothing without a subset."""

    def candidates(self, head: Request) -> list[str]:
        return super().candidates(head) if subset_of(head) else []


def subset_of(head: Request) -> list[object]:
    hint = head.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    return list(hint[SUBSET]) if SUBSET in hint else []


class OneBody(Mutant):
    """Keeps the bodies of all streams in one place."""

    kept = b""

    def hears(self, message: Request) -> list[Request]:
        if message.WhichOneof("request") != "request_body":
            return [message]
        self.kept += message.request_body.body
        if not message.request_body.end_of_stream:
            return []
        message.request_body.body, self.kept = self.kept, b""
        return [message]


class Rewriting(Picker):
    """Gives the model another name, which is no defect."""

    def whole_request(self, head: Request, body: bytes, trailers: bool) -> Iterator[Response]:
        return super().whole_request(head, body.replace(b'"model": "', b'"model":  "base-'), trailers)

    def judged(self, head: Request, body: bytes) -> Response | None:
        return super().judged(head, body.replace(b'"base-', b'"'))


class Leaving(Mutant):
    """Ends the stream in an orderly way when the answer begins, which is no defect."""

    async def Process(
        self, requests: AsyncIterator[Request], context: grpc.aio.ServicerContext[Request, Response]
    ) -> AsyncIterator[Response]:
        async for response in super().Process(requests, context):
            if response.HasField("response_headers"):
                return
            yield response


class Buffering(Mutant):
    """Gives an answer back when it is complete."""

    kept = b""

    def says(self, response: Response) -> list[Response]:
        if not response.HasField("response_body"):
            return [response]
        self.kept += streamed(response).body
        if not streamed(response).end_of_stream:
            return []
        streamed(response).body, self.kept = self.kept, b""
        return [response]


class TwoEnds(Mutant):
    """Answers a second end of the body with the last piece once more."""

    def says(self, response: Response) -> list[Response]:
        ends = response.HasField("request_body") and streamed(response).end_of_stream
        return [response, response] if ends else [response]


class DeadAfterAnError(Mutant):
    """Says nothing any more when it has refused a request."""

    dead = False

    def says(self, response: Response) -> list[Response]:
        if self.dead:
            return []
        self.dead = response.HasField("immediate_response")
        return [response]


class OneHead(Mutant):
    """Ignores headers until it has had a body."""

    begun = False

    def hears(self, message: Request) -> list[Request]:
        again = self.begun and message.HasField("request_headers")
        self.begun = (self.begun or message.HasField("request_headers")) and not message.request_body.end_of_stream
        return [] if again else [message]


class AnswersObservers(Mutant):
    """Does not know of observability mode."""

    def hears(self, message: Request) -> list[Request]:
        message.observability_mode = False
        return [message]


class StaysOpen(Picker):
    """Does not end its side of a stream."""

    async def Process(
        self, requests: AsyncIterator[Request], context: grpc.aio.ServicerContext[Request, Response]
    ) -> AsyncIterator[Response]:
        async for response in super().Process(requests, context):
            yield response
        await asyncio.Event().wait()


class Leaking(Picker):
    """Serves one stream, and never gets its place back."""

    places = 1

    async def Process(
        self, requests: AsyncIterator[Request], context: grpc.aio.ServicerContext[Request, Response]
    ) -> AsyncIterator[Response]:
        self.places -= 1
        if self.places < 0:
            await asyncio.Event().wait()
        async for response in super().Process(requests, context):
            yield response
