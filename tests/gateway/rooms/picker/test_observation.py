"""An answer that a second filter shows: read for learning, while the proxy passes it on by itself."""

from __future__ import annotations

import pytest

from tests.gateway.rooms.picker.played_proxy import EVENTS, IDLE, NONE, PlayedObservation, PlayedProxy, PlayedStream

LEARNED = {"policy": {"name": "learned"}}
EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


def shown(proxy: PlayedProxy) -> tuple[PlayedStream, PlayedObservation]:
    stream = proxy.picked(NONE)
    return stream, PlayedObservation(proxy, stream)


@pytest.mark.parametrize("order", ["stream, observation", "observation, stream"])
async def test_an_answer_is_learned_from_in_whatever_order_the_streams_begin(order: str) -> None:
    proxy = PlayedProxy(model=LEARNED)
    stream, observation = shown(proxy)
    for name in order.split(", "):
        stream.head(headers=EVENTS) if name == "stream" else observation.head()
    observation.answer(EVENT, EVENT + USAGE, DONE)
    assert observation.handler.has_ended
    stream.handler.close()
    observation.handler.close()
    assert proxy.count("gateway_output_tokens_total") == 2
    assert proxy.count("gateway_requests_total", outcome="ok") == 1
    assert proxy.in_flight() == IDLE


@pytest.mark.parametrize("is_complete", [True, False])
async def test_the_end_may_be_shown_after_the_stream_has_ended_or_not_at_all(is_complete: bool) -> None:
    proxy = PlayedProxy(model=LEARNED)
    stream, observation = shown(proxy)
    stream.head(headers=EVENTS)
    observation.head()
    observation.answer(EVENT, is_complete=False)
    stream.handler.close()
    if is_complete:
        observation.answer(USAGE, DONE)
    observation.handler.close()
    assert not is_complete or proxy.count("gateway_output_tokens_total") == 2
    assert proxy.count("gateway_requests_total", outcome="ok" if is_complete else "cancelled") == 1
    assert proxy.in_flight() == IDLE


@pytest.mark.parametrize("pool", [{"model": None}, {"model": LEARNED, "pool": {"picker": {"answers": 0}}}])
async def test_nothing_more_is_shown_where_nothing_needs_it(pool: dict[str, object]) -> None:
    proxy = PlayedProxy(**pool)  # type: ignore[arg-type]
    stream, observation = shown(proxy)
    observation.head()
    assert observation.handler.has_ended
    observation.handler.close()
    stream.head(headers=EVENTS)
    stream.handler.close()
    assert proxy.count("gateway_requests_total", outcome="ok") == 1
    assert proxy.in_flight() == IDLE


async def test_the_answer_to_a_request_of_another_process_is_left_alone() -> None:
    proxy = PlayedProxy(model=LEARNED)
    stream, observation = shown(proxy)
    observation._name = "unknown"
    observation.head()
    assert observation.handler.has_ended
    stream.head(headers=EVENTS)
    stream.handler.close()
    assert proxy.count("gateway_requests_total", outcome="ok") == 1
