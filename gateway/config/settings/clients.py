"""The sections `paths` and `cors`: what clients may ask for, and from which web pages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from backends.validation import Issue
from gateway.config.settings.base import Settings
from gateway.http.paths import canonical_path, is_own

_ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:.]+\](:[0-9]{1,5})?")


def _checked_path(pattern: str) -> str:
    path = pattern.removesuffix("*")
    if "*" in path or not path.startswith("/") or canonical_path(f"{path}x".encode()) != f"{path}x":
        raise ValueError("expected a path, such as /v1/score, or its beginning with a * after it")
    if is_own(path) or is_own(f"{path}x"):
        raise ValueError("the gateway answers this path itself")
    return pattern


def _checked_origin(origin: str) -> str:
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise ValueError("expected an origin without a path, such as https://page.example, or *")
    return origin


PathPattern = Annotated[str, AfterValidator(_checked_path)]


class CorsSettings(Settings):
    """Web pages that may use the gateway from a browser; null leaves CORS to the engines.

    Keys are sent in a header; cookies are never allowed.

    Parameters
    ----------
    origins
        Origins of the pages; `*` alone allows all.
    """

    origins: Annotated[list[Annotated[str, AfterValidator(_checked_origin)]], Field(min_length=1)]

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an issue for a `*` next to other values."""
        origins = data.get("origins")
        if isinstance(origins, list) and "*" in origins and len(origins) > 1:
            yield Issue(("origins",), "has * beside others", "keep one or the other")
