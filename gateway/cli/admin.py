"""The `/admin` endpoints of a running gateway, for the commands that query or control it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from gateway.cli.output import say

DEFAULT_URL = "http://127.0.0.1:8080"
_TIMEOUT_S = 60.0
_PAUSE_S = 1.0
_KEY_HELP = (
    "give admin.key of its pool file, or the key that it printed at start, with --admin-key or GATEWAY_ADMIN_KEY"
)


def _base(url: str) -> str:
    """Return the address of a gateway; the base URL of OpenAI clients is accepted too."""
    return (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")


Url = Annotated[str, typer.Option(help="The gateway's address.", envvar="GATEWAY_URL", callback=_base)]
AdminKey = Annotated[
    str, typer.Option(help="admin.key of its pool file, or the key printed at start.", envvar="GATEWAY_ADMIN_KEY")
]


@dataclass(frozen=True, slots=True)
class Admin:
    """The `/admin` endpoints of a running gateway; `get` and `post` send `model` along."""

    url: str
    key: str
    model: str | None = None
    patience_s: float = 0.0  # seconds for which `get` waits for a gateway that restarts

    def get(self, path: str, **query: object) -> Any:
        """Return the answer to a `GET`; without one, print a message and exit 1."""
        return self._request("GET", path, {"model": self.model, **query})

    def post(self, path: str, **fields: object) -> Any:
        """Return the answer to a `POST`."""
        return self._request("POST", path, {}, json={"model": self.model, **fields})

    def send(self, path: str, body: bytes = b"", /, **query: object) -> Any:
        """Return the answer to a `POST` of any body."""
        return self._request("POST", path, query, content=body)

    def _request(self, method: str, path: str, query: dict[str, object], **body: Any) -> Any:
        import httpx

        from backends.http.authorities import trusted

        parameters = urlencode({name: value for name, value in query.items() if value is not None})
        url = f"{self.url.rstrip('/')}{path}{'?' if parameters else ''}{parameters}"
        headers = {b"authorization": f"Bearer {self.key.strip()}".encode()} if self.key else {}
        until_s = time.monotonic() + (self.patience_s if method == "GET" else 0.0)
        try:
            while True:
                try:
                    response = httpx.request(
                        method, url, headers=headers, timeout=_TIMEOUT_S, trust_env=False, verify=trusted(), **body
                    )
                    break
                except httpx.TransportError:
                    if time.monotonic() >= until_s:
                        raise
                    time.sleep(_PAUSE_S)
            answer = response.json(object_hook=lambda fields: _Answer(fields, url))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            hint = ". Does a gateway run there? --url names another." if isinstance(error, httpx.ConnectError) else ""
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                hint = ". SSL_CERT_FILE names a file with the authority that signed it, or with the certificate itself."
            raise failure(f"{self.url} cannot be reached: {error}{hint}") from None
        except ValueError:
            raise failure(f"{url} answered {response.status_code}, but not as a gateway") from None
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise failure(f"{self.url}: {'this key is not accepted' if self.key else 'a key is needed'}; {_KEY_HELP}")
        if response.status_code != httpx.codes.OK:
            match answer:
                case {"error": {"message": str(said), **others}} if others.get("code") != "not_found":
                    raise failure(said)
            if response.status_code == httpx.codes.NOT_FOUND:
                raise failure(f"{self.url} does not know {path}: it is no gateway, or older than this command")
            raise failure(f"{url} answered {response.status_code}")
        return answer


class _Answer(dict[str, Any]):
    """A JSON object in an answer; a missing field ends the command, since no gateway sent it."""

    def __init__(self, fields: dict[str, Any], url: str) -> None:
        super().__init__(fields)
        self._url = url

    def __missing__(self, name: str) -> Any:
        raise failure(f"{self._url} answered without {name!r}: it is no gateway, or of another version")


def failure(message: str) -> typer.Exit:
    """Print a message on standard error; return what ends the command."""
    say(message, err=True)
    return typer.Exit(1)
