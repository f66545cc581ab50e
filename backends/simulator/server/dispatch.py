"""What vLLM's web framework, Starlette, does before a handler: requests of other origins, paths and methods."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import orjson

from backends.simulator.server.http import Exchange, Headers

_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY")
_VARY = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers, Access-Control-Request-Private-Network"
_MAX_AGE_S = 600
_UNQUOTED = ":/%#?=@[]!$&'()*+,;"


@dataclass(frozen=True, slots=True)
class Route:
    """A path with its handler.

    Examples
    --------
    >>> Route("/v1/responses/{response_id}", ("GET",), print).matches("/v1/responses/resp_1")
    True
    """

    path: str  # the path; a part in braces stands for any segment
    methods: tuple[str, ...]  # accepted methods; HEAD is not one of them unless it is named
    handler: Callable[[Exchange], None]
    _pattern: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pattern = "".join(
            "[^/]+" if part.startswith("{") else re.escape(part) for part in re.split(r"(\{\w+\})", self.path)
        )
        object.__setattr__(self, "_pattern", re.compile(pattern))

    def matches(self, path: str) -> bool:
        """Return whether the route has this path."""
        return self._pattern.fullmatch(path) is not None


class Routes:
    """The routes of a server."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._by_path: dict[str, Route] = {}
        self._with_parameters: list[Route] = []
        for route in routes:
            if "{" in route.path:
                self._with_parameters.append(route)
            else:
                self._by_path[route.path] = route

    def find(self, exchange: Exchange) -> Route | None:
        """Return the route of a request; without one, answer it and return None."""
        request = exchange.request
        route = self._with_path(request.path)
        if route is not None and request.method in route.methods:
            return route
        if route is not None:
            exchange.answer_headers.append(("allow", ", ".join(route.methods)))
            exchange.respond(405, orjson.dumps({"detail": "Method Not Allowed"}))
        elif (path := self._other_path(request.path)) is not None:
            query = f"?{request.query}" if request.query else ""
            location = f"http://{request.headers.get('host', '')}{path}{query}"
            exchange.answer_headers.append(("location", quote(location, safe=_UNQUOTED)))
            exchange.respond(307, b"", None)
        else:
            exchange.respond(404, orjson.dumps({"detail": "Not Found"}))
        return None

    def _with_path(self, path: str) -> Route | None:
        route = self._by_path.get(path)
        return route or next((route for route in self._with_parameters if route.matches(path)), None)

    def _other_path(self, path: str) -> str | None:
        """Return the path of a route that differs from `path` by slashes at the end."""
        other = path.rstrip("/") if path.endswith("/") else f"{path}/"
        return other if path != "/" and self._with_path(other) is not None else None


class CrossOrigin:
    """Cross-origin requests (CORS) as with vLLM's `--allowed-origins`, whose default `["*"]` allows all.

    All methods and headers are allowed, and no credentials: the defaults of the related options.
    """

    def __init__(self, allowed_origins: Sequence[str]) -> None:
        self._allows_all = "*" in allowed_origins
        self._origins = frozenset(allowed_origins)

    def is_preflight(self, exchange: Exchange) -> bool:
        """Return whether a request asks, for a browser, if another one is allowed."""
        headers = exchange.request.headers
        return exchange.request.method == "OPTIONS" and {"origin", "access-control-request-method"} <= headers.keys()

    def answer_preflight(self, exchange: Exchange) -> None:
        """Answer such a request."""
        asked = exchange.request.headers
        origin, wanted_headers = asked["origin"], asked.get("access-control-request-headers")
        headers: Headers = [("vary", _VARY)]
        failures = []
        if self._allows_all or origin in self._origins:
            headers.append(("access-control-allow-origin", "*" if self._allows_all else origin))
        else:
            failures.append("origin")
        headers += [("access-control-allow-methods", ", ".join(_METHODS)), ("access-control-max-age", str(_MAX_AGE_S))]
        if asked["access-control-request-method"] not in _METHODS:
            failures.append("method")
        if wanted_headers is not None:
            headers.append(("access-control-allow-headers", wanted_headers))
        if "access-control-request-private-network" in asked:
            failures.append("private-network")
        exchange.answer_headers += headers
        text = "Disallowed CORS " + ", ".join(failures) if failures else "OK"
        exchange.respond(400 if failures else 200, text.encode(), "text/plain; charset=utf-8")

    def headers(self, origin: str | None) -> Headers:
        """Return the headers of the answer to a request from an origin, or from no web page (None)."""
        if origin is None or not (self._allows_all or origin in self._origins):
            return [("vary", "Origin")]
        return [("access-control-allow-origin", "*" if self._allows_all else origin), ("vary", "Origin")]
