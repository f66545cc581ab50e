"""Other origins, unknown paths and wrong methods are answered as Starlette does in vLLM."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response
from fastapi.middleware.cors import CORSMiddleware

CHAT = "/v1/chat/completions"
PAGE = "https://page.example"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST"}
COMPARED = ("allow", "location", "vary", "content-type", "content-length")

REQUESTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("GET", "/health", {}),
    ("GET", "/health", {"origin": PAGE}),
    ("GET", "/health", {"origin": PAGE, "cookie": "a=b"}),
    ("HEAD", "/health", {"origin": PAGE}),
    ("GET", "/nothing", {"origin": PAGE}),
    ("GET", "/nothing/", {}),
    ("GET", "/", {}),
    ("GET", "/health/", {"origin": PAGE}),
    ("GET", "/health//?a=b&c=%20", {}),
    ("POST", f"{CHAT}/", {}),
    ("GET", f"{CHAT}/", {}),
    ("GET", CHAT, {"origin": PAGE}),
    ("DELETE", "/health", {}),
    ("OPTIONS", CHAT, {}),
    ("OPTIONS", CHAT, {"origin": PAGE}),
    ("OPTIONS", CHAT, {"access-control-request-method": "POST"}),
    ("OPTIONS", CHAT, PREFLIGHT),
    ("OPTIONS", "/nothing", PREFLIGHT),
    ("OPTIONS", CHAT, {**PREFLIGHT, "access-control-request-headers": "authorization, content-type"}),
    ("OPTIONS", CHAT, {**PREFLIGHT, "access-control-request-method": "BREW"}),
    ("OPTIONS", CHAT, {**PREFLIGHT, "access-control-request-private-network": "true"}),
    ("POST", "/v1/responses/resp_1", {}),
    ("GET", "/v1/responses/resp_1/", {}),
    ("GET", "/v1/responses/resp_1/cancel", {}),
    ("GET", "/v1/responses/a/b", {}),
    ("PUT", "/invocations", {}),
    ("GET", "/v1%2Fmodels/", {}),
)


def starlette(origins: list[str]) -> httpx.AsyncClient:
    """Return a client of an application with some routes of vLLM, and its middleware."""
    app = FastAPI(openapi_url=None)
    app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])

    def healthy() -> Response:
        return Response()

    for path in ("/health", "/v1/models", "/v1/responses/{response_id}"):
        app.get(path)(healthy)
    for path in (CHAT, "/invocations", "/v1/responses/{response_id}/cancel"):
        app.post(path)(healthy)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica.example:8000")


def shown(answer: httpx.Response) -> dict[str, Any]:
    cors = {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}
    if methods := cors.pop("access-control-allow-methods", None):
        assert {"GET", "POST", "OPTIONS"} <= set(methods.split(", "))  # the others depend on Starlette's version
    same = {name: answer.headers.get(name) for name in COMPARED}
    return {"status": answer.status_code, "body": answer.text, **cors, **same}


@pytest.mark.parametrize(
    ("replica", "origins"),
    [("plain", ["*"]), ("own pages", [PAGE]), ("other pages", ["https://other.example"])],
)
@pytest.mark.parametrize(("method", "path", "headers"), REQUESTS)
async def test_requests_are_answered_like_starlette(
    simulator: Any, replica: str, origins: list[str], method: str, path: str, headers: dict[str, str]
) -> None:
    async with starlette(origins) as real, httpx.AsyncClient(base_url=simulator.urls[replica]) as simulated:
        expected = await real.request(method, path, headers=headers)
        headers = {**headers, "host": "replica.example:8000"}
        assert shown(await simulated.request(method, path, headers=headers)) == shown(expected)


def test_the_key_comes_before_the_path_but_after_a_preflight(simulator: Any) -> None:
    url = simulator.urls["locked"]
    refused = httpx.get(f"{url}/v1/nothing", headers={"origin": PAGE})
    assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
    assert "access-control-allow-origin" not in refused.headers, "the key is checked outside of the other middleware"
    assert httpx.options(url + CHAT, headers=PREFLIGHT).status_code == 200
