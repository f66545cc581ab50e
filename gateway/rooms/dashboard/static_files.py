"""The files of the page, as browsers are told to treat them."""

from __future__ import annotations

import mimetypes
import os
from pathlib import Path

from fastapi import Response
from fastapi.staticfiles import StaticFiles
from starlette.types import Scope

_HEADERS = {
    # Nothing from other hosts, and nothing inline.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked for again each time, and answered 304
}


class PageFiles(StaticFiles):
    """The files of the folder `static`."""

    def __init__(self) -> None:
        mimetypes.init()  # reads files, as the first answer would
        super().__init__(directory=Path(__file__).parent / "static")

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """Return a file, or 304 if the client has it."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_HEADERS)
        return response
