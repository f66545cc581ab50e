"""The routes of the dashboard: the page, which holds no data, and what it asks for below `/admin/dashboard`."""

from __future__ import annotations

from difflib import unified_diff
from typing import Any

from fastapi import FastAPI, Request, Response

from gateway.dashboard.dashboard import Dashboard
from gateway.dashboard.pages import EventStream
from gateway.dashboard.static_files import load_static_files
from gateway.dialects.errors import GatewayError
from gateway.service.admin_policy import rules_of
from gateway.service.assembly import Gateway

_DATA = "/admin/dashboard"


def add_dashboard(app: FastAPI, gateway: Gateway) -> Dashboard:
    """Add the routes of a dashboard, and return it; `gateway.routing.access` checks the keys."""
    dashboard, files = Dashboard(gateway), load_static_files()

    @app.get("/dashboard", include_in_schema=False)
    async def page(request: Request) -> Response:
        """Return the page."""
        return files["index.html"].answer(request)

    @app.get("/dashboard/static/{name:path}", include_in_schema=False)
    async def static(request: Request, name: str) -> Response:
        """Return a file of the page."""
        if name not in files:
            raise GatewayError(404, f"The dashboard has no file {name}.", code="not_found")
        return files[name].answer(request)

    @app.get(f"{_DATA}/access", tags=["dashboard"])
    async def access(request: Request) -> dict[str, Any]:
        """Return what the key of the request may do: look, or also pin and distil."""
        dashboard.check()
        return {"write": dashboard.may(dict(request.scope["headers"]), write=True)}

    @app.get(f"{_DATA}/events", tags=["dashboard"])
    async def events(request: Request) -> Response:
        """Stream the live data: an event `history`, then an event `snapshot` each second."""
        dashboard.check()
        has_key = dashboard.may(dict(request.scope["headers"]), write=False)
        return EventStream(dashboard.pages, dashboard.first, has_key=has_key)

    @app.get(f"{_DATA}/snapshot", tags=["dashboard"])
    async def snapshot() -> Response:
        """Return one snapshot."""
        dashboard.check()
        return Response(dashboard.snapshot(), media_type="application/json", headers={"cache-control": "no-store"})

    @app.get(f"{_DATA}/rules", tags=["dashboard"])
    async def rules(model: str | None = None, version: int | None = None) -> dict[str, Any]:
        """Return one version of the distilled rules, the latest by default, as YAML."""
        dashboard.check()
        return await rules_of(gateway, model, version)

    @app.get(f"{_DATA}/diff", tags=["dashboard"])
    async def diff(old: int, new: int, model: str | None = None) -> dict[str, Any]:
        """Return the difference between two versions of the rules, in the unified format."""
        dashboard.check()
        before, after = await rules_of(gateway, model, old), await rules_of(gateway, model, new)
        lines = unified_diff(before["text"].splitlines(), after["text"].splitlines(), lineterm="")
        return {"model": before["model"], "old": old, "new": new, "lines": [*lines][2:]}  # without the names of files

    return dashboard
