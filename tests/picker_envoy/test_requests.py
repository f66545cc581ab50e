"""What becomes of requests that Envoy sends on as the picker says."""

from __future__ import annotations

import pytest

from tests.picker_envoy.conftest import FIRST_S, Stage
from tests.support.command import until

pytestmark = pytest.mark.slow

LARGE = "a long prompt " * 16_000
"""About 220 KB."""


def outcomes(stage: Stage, outcome: str, backend: str) -> float:
    return stage.metric("gateway_requests_total", outcome=outcome, backend=backend)


@pytest.mark.parametrize("listener", ["", "small pieces"])
def test_a_body_in_pieces_arrives_whole(stage: Stage, listener: str) -> None:
    answer = stage.chat(LARGE, listener=listener)
    assert answer.status_code == 200
    seen = stage.engines[answer.headers["x-gateway-backend"]].seen[-1]
    assert seen.json["messages"][0]["content"] == LARGE
    assert seen.header("authorization") is None, "the client's key is the gateway's"


def test_refusals_reach_the_client_as_those_of_the_gateway(stage: Stage) -> None:
    unknown = stage.chat(headers={"authorization": "Bearer sk-wrong"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (401, "invalid_api_key")
    slow = {"authorization": "Bearer sk-slow"}
    answers = [stage.chat(headers=slow) for _ in range(3)]
    limited = answers[-1]
    assert (limited.status_code, limited.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(limited.headers["retry-after"]) >= 1
    assert limited.headers["x-request-id"]


@pytest.mark.parametrize("listener", ["", "full duplex"])
def test_an_answer_in_pieces_is_seen_whole(stage: Stage, listener: str) -> None:
    tokens, ok = stage.metric("gateway_output_tokens_total", backend="a"), outcomes(stage, "ok", "a")
    ttft, e2e = (stage.metric(f"gateway_{name}_seconds_sum", backend="a") for name in ("ttft", "e2e"))
    with stage.stream("parts", listener, **{"x-gateway-backend": "a"}) as answer:
        text = answer.read()
    assert (text.count(b'"content"'), text.endswith(b"data: [DONE]\n\n")) == (4, True)
    until(lambda: outcomes(stage, "ok", "a") == ok + 1)
    assert stage.metric("gateway_output_tokens_total", backend="a") == tokens + 4
    assert FIRST_S <= stage.metric("gateway_ttft_seconds_sum", backend="a") - ttft < 10.0
    assert stage.metric("gateway_e2e_seconds_sum", backend="a") - e2e >= FIRST_S
    until(lambda: stage.metric("gateway_in_flight") == 0)


@pytest.mark.parametrize("listener", ["", "full duplex", "not shown"])
def test_a_client_that_leaves_a_stream_ends_the_request(stage: Stage, listener: str) -> None:
    aborted, cancelled = stage.engines["a"].aborted, outcomes(stage, "cancelled", "a")
    with stage.stream("endless", listener, **{"x-gateway-backend": "a"}) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        until(lambda: stage.metric("gateway_in_flight", backend="a") == 1)
    until(lambda: stage.engines["a"].aborted == aborted + 1)
    until(lambda: stage.metric("gateway_in_flight") == 0)
    known = 0 if listener == "not shown" else 1  # of an answer that is not shown only the end is known
    until(lambda: outcomes(stage, "cancelled", "a") == cancelled + known)


def test_a_fallback_serves_where_the_first_endpoint_refuses(stage: Stage) -> None:
    """The picker, which has not probed yet, still names the dead replica first in every second list."""
    with stage.without("c"):
        answers = [stage.chat(model="failing") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert {answer.headers["x-gateway-backend"] for answer in answers} == {"d"}
    until(lambda: outcomes(stage, "ok", "d") == 2)  # the picker may hear of the end after the client
    assert stage.metric("gateway_retries_total", backend="c", kind="proxy") == 1
    assert outcomes(stage, "ok", "c") == 0
