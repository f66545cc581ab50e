"""Responses that real engines store: another gateway finds the replica of a chain, and says which one is lost."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.vllm.conftest import Served, pool_before, serve
from tests.vllm.requests import to

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def second(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start another gateway in front of the same engines, which shares nothing with the first."""
    folder = tmp_path_factory.mktemp("second")
    backends = {
        name: {"url": each["url"], "method": each["method"]}
        | ({"speculative_config": {"num_speculative_tokens": k}} if (k := each["num_speculative_tokens"]) else {})
        for name, each in served.backends().items()
    }
    with serve(folder, str(pool_before(folder, backends, "round_robin"))) as gateway:
        yield gateway


def ask(gateway: Served, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
    body = {"model": "tiny", "input": "Write merge of Python's heapq.", "max_output_tokens": 8, **fields}
    return httpx.post(f"{gateway.url}/v1/responses", json=body, headers=headers, timeout=120)


def test_another_gateway_finds_the_engine_that_holds_a_response(served: Served, second: Served) -> None:
    for name in served.backends():
        first = ask(served, to(name)).json()["id"]
        chained = ask(second, previous_response_id=first)
        assert (chained.status_code, chained.headers["x-gateway-backend"]) == (200, name)
        read = httpx.get(f"{second.url}/v1/responses/{first}", headers={"x-gateway-model": "tiny"}, timeout=60)
        assert read.json()["id"] == first


def test_a_response_that_no_engine_holds_is_said_to_be_lost(second: Served) -> None:
    response = ask(second, previous_response_id="resp_gone")
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "Response with id 'resp_gone' not found."
