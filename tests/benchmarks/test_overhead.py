from benchmarks.overhead.upstream import LAST_EVENTS
from gateway.dialects.sse import EventStream
from policies.features.request import Endpoint


def test_streams_of_the_upstream_are_whole() -> None:
    stream = EventStream(Endpoint.CHAT)

    assert stream.feed(LAST_EVENTS) == LAST_EVENTS
    assert stream.ending.is_complete
