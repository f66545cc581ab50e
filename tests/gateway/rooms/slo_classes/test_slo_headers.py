"""Latency objectives of a request, from its headers or its key."""

from __future__ import annotations

import pytest

from gateway.relay.observers import EndedExchange
from gateway.rooms.recorder.document import RequestNotes
from gateway.routing.router import RoutedRequest
from tests.gateway.conftest import MODEL, start_gateway


@pytest.mark.slow
async def test_invalid_headers_are_answered_with_400() -> None:
    async with start_gateway({"a": "baseline"}, {"name": "learned", "objective": "goodput"}) as running:
        for header, value in [("x-slo-ttft-ms", "-1"), ("x-slo-tpot-ms", "soon")]:
            refused = await running.chat(headers={header: value})
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "invalid_header"
            assert header in refused.json()["error"]["message"]
        assert running.upstreams["a"].seen == []


KEYS = [
    {"name": "quick", "key": "sk-quick", "slo": {"ttft_ms": 300, "tpot_ms": 25}},
    {"name": "half", "key": "sk-half", "slo": {"tpot_ms": 40}},
    {"name": "plain", "key": "sk-plain"},
]
BOUNDS = [
    ("quick", {}, 0.3, 0.025),
    ("quick", {"x-slo-ttft-ms": "1000"}, 1.0, 0.025),
    ("quick", {"x-slo-ttft-ms": "1000", "x-slo-tpot-ms": "1"}, 1.0, 0.001),
    ("half", {"x-slo-ttft-ms": "500"}, 0.5, 0.04),
    ("half", {}, None, 0.04),
    ("plain", {}, None, None),
]


async def test_the_objective_of_a_key_applies_to_requests_without_headers() -> None:
    policy = {"name": "learned", "objective": "goodput", "slo": {"ttft_ms": 9000}}
    async with start_gateway({"a": "baseline", "b": "baseline"}, policy, keys=KEYS) as running:
        observed: list[tuple[float | None, float | None]] = []

        class Follow:
            def follow(self, routed: RoutedRequest, body: bytes) -> RequestNotes:
                return RequestNotes(self.see, keeps_answer=False)

            def see(self, notes: RequestNotes, ended: EndedExchange) -> None:
                assert ended.outcome is not None
                observed.append((ended.outcome.request.slo_ttft_s, ended.outcome.request.slo_tpot_s))

        running.gateway.relay.followers[MODEL].append(Follow())
        for key, headers, ttft_s, tpot_s in BOUNDS:
            answer = await running.chat(headers={"authorization": f"Bearer sk-{key}", **headers})
            assert answer.status_code == 200
            assert observed.pop() == (ttft_s and pytest.approx(ttft_s), tpot_s and pytest.approx(tpot_s))
