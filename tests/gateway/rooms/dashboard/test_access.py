"""Who may see the dashboard and its data, and how browsers are told to treat the page."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gateway.dialects.errors import GatewayError
from tests.gateway.conftest import ADMIN, Running, bearer, start_gateway
from tests.gateway.rooms.dashboard.conftest import HISTORY, SNAPSHOT

KEYS = [
    {"name": "team", "key": "sk-team"},
    {"name": "viewer", "key": "sk-viewer", "admin": "read"},
    {"name": "operator", "key": "sk-operator", "admin": "write"},
]
READS = (SNAPSHOT, HISTORY)


async def statuses(running: Running, path: str) -> list[int]:
    keys = ({}, bearer("sk-wrong"), bearer("sk-team"), bearer("sk-viewer"), bearer("sk-operator"), ADMIN)
    return [(await running.client.get(path, headers=headers)).status_code for headers in keys]


async def test_the_data_needs_a_key_that_may_read_unless_it_is_public() -> None:
    async with start_gateway(keys=KEYS) as running:
        for path in READS:
            assert await statuses(running, path) == [401, 401, 403, 200, 200, 200]
    async with start_gateway(keys=KEYS, dashboard={"public": True}) as running:
        for path in READS:
            assert await statuses(running, path) == [200] * 6
        for path in ("/admin/pool", "/admin/config", "/admin/policy", "/admin/dashboardx", "/admin"):
            assert (await running.client.get(path)).status_code == 401
        for path in ("/admin/policy/unpin", SNAPSHOT):
            assert (await running.client.post(path, json={})).status_code == 401
        assert (await running.client.request("GET", SNAPSHOT, content=b"body")).status_code == 400


@pytest.mark.slow
async def test_a_disabled_dashboard_is_not_there() -> None:
    async with start_gateway(dashboard={"enabled": False, "public": True}) as running:
        for path in ("/dashboard", "/dashboard/static/index.html", "/admin/docs", *READS):
            assert (await running.client.get(path, headers=ADMIN)).status_code == 404


async def test_it_is_at_the_admin_address_if_there_is_one() -> None:
    async with start_gateway(admin={"listen": "127.0.0.1:0"}, dashboard={"public": True}) as running:
        for path in ("/dashboard", "/dashboard/static/index.html", "/admin/docs", *READS):
            response = await running.client.get(path, headers=ADMIN)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
        admin = running.gateway.admin_access
        for path in ("/dashboard", SNAPSHOT):
            admin.check_own("GET", path, {})
        with pytest.raises(GatewayError):
            admin.check_own("POST", SNAPSHOT, {})


BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


JSON = {"accept": "application/json"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [307, 404, 404]),
        ({"keys": KEYS}, [307, 401, 401]),
        ({"dashboard": {"enabled": False}}, [404, 404, 404]),
        ({"admin": {"listen": "127.0.0.1:0"}}, [404, 404, 404]),
        ({"paths": ["/"]}, [200, 200, 200]),
        ({"paths": ["/*"]}, [200, 200, 200]),
    ],
)
async def test_the_root_leads_browsers_to_the_page_and_is_for_others_what_it_was(
    settings: dict[str, Any], expected: list[int]
) -> None:
    async with start_gateway(**settings) as running:
        asked = (("GET", BROWSER), ("GET", JSON), ("POST", BROWSER))
        found = [await running.client.request(method, "/", headers=headers) for method, headers in asked]
        assert [each.status_code for each in found] == expected
        if expected[0] == 307:
            assert found[0].headers["location"] == "dashboard"  # relative: also behind a proxy that adds a path


async def test_the_page_about_admin_needs_no_key_and_holds_no_data() -> None:
    async with start_gateway(keys=KEYS) as running:
        assert await statuses(running, "/admin/docs") == [200] * 6
        assert (await running.client.post("/admin/docs")).status_code == 401
        shown = (await running.admin("openapi.json"))["paths"]
        assert {"/admin/pool", "/admin/drain", "/admin/advice", "/v1/models"} <= shown.keys()


async def test_the_page_may_load_nothing_from_elsewhere_and_nothing_inline(running: Running) -> None:
    for path in ("/dashboard", "/dashboard/static/index.html", "/admin/docs"):
        response = await running.client.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
        same = ("script-src", "style-src", "connect-src", "img-src")
        none = ("default-src", "frame-ancestors", "base-uri", "form-action")
        assert policy == dict.fromkeys(same, "'self'") | dict.fromkeys(none, "'none'")
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        known = {"if-none-match": response.headers["etag"]}
        again = await running.client.get(path, headers=known)
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"] == response.headers["content-security-policy"]
    assert (await running.client.post("/dashboard", json={})).status_code in {400, 405}


@pytest.mark.parametrize("end", ["../room.py", "%2e%2e/room.py", "..%2froom.py", "%2fetc%2fpasswd", "no.js", "", "/x"])
async def test_no_path_reaches_the_file_system(running: Running, end: str) -> None:
    response = await running.client.request("GET", f"{running.url}/dashboard/static/{end}")
    assert response.status_code in {400, 404}
    assert not re.search(b"import|root:", response.content)
    assert not any(upstream.seen for upstream in running.upstreams.values())
