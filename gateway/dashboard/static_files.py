"""The files of the page, held in memory: no path that a client sends reaches the file system."""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import Request, Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""The content security policy: nothing from other hosts, and nothing inline."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked for again each time, and answered 304
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file as it is sent."""

    body: bytes
    media_type: str
    etag: str

    def answer(self, request: Request) -> Response:
        """Return the file, or 304 if the client has it."""
        headers = HEADERS | {"etag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(None, 304, headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def load_static_files() -> dict[str, StaticFile]:
    """Return the files of the package's folder `static`, by their path in it."""
    return dict(_files(resources.files("gateway.dashboard") / "static", ""))


def _files(folder: Traversable, path: str) -> Iterator[tuple[str, StaticFile]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{path}{entry.name}/")
        else:
            yield path + entry.name, _file(entry.name, entry.read_bytes())


def _file(name: str, body: bytes) -> StaticFile:
    guessed = mimetypes.guess_type(name)[0] or "text/plain"
    kind = "text/javascript" if name.endswith((".js", ".mjs")) else guessed
    media_type = f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
    return StaticFile(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:20]}"')
