"""Follows objects of Kubernetes' API server.

Objects are listed once, then watched from the version of that list on [1]_. A watch that ends is resumed where it
was; if the API server no longer has that version (410), the objects are listed again.

References
----------
.. [1] Kubernetes, "API Concepts: Efficient detection of changes", https://kubernetes.io/docs/reference/using-api/api-concepts/
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx

from backends import background
from backends.files.regular import read_text
from backends.http.address import host_and_port
from gateway.discovery.source import SourceError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_WATCH_S = 290
"""Seconds after which a watch restarts with the current token: tokens are replaced within the hour."""
_SHORTEST_S = 1.0
"""Least seconds between the starts of two watches: behind some proxies they end immediately."""
_PAGE = 500
_MOST_BYTES = 32 * 2**20
"""Size limit for one page of a list, and for one event."""
_MOST_FILE_BYTES = 2**20
_TIMEOUT = httpx.Timeout(10.0, read=_WATCH_S + 30.0)
_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
"""Detects a vanished server within half a minute. Silence proves nothing: a watch may be silent for minutes."""
_GONE = 410
UNEXPECTED = ValueError, LookupError, TypeError, AttributeError
"""Raised on reading an object that lacks a field, or has it in another form."""
Kept = TypeVar("Kept")


@dataclass(frozen=True, slots=True)
class ApiServer:
    """The API server, and the files of the service account that the gateway runs as."""

    url: str  # its address
    # Folder with `token`, `ca.crt` and `namespace`. They are read again for each list and watch.
    account: Path = _ACCOUNT

    @classmethod
    def of_cluster(cls, environ: Mapping[str, str] = os.environ) -> ApiServer:
        """Return the API server of the cluster that this process runs in."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise SourceError("KUBERNETES_SERVICE_HOST is not set: the gateway does not run in a cluster")
        return cls(f"https://{host_and_port(host, port)}")

    async def client(self) -> httpx.AsyncClient:
        """Return a client with the current token and authority."""
        token, tls = await self._read("token"), None
        if self.url.startswith("https:"):
            try:
                tls = ssl.create_default_context(cadata=await self._read("ca.crt"))
            except (ssl.SSLError, ValueError) as error:
                raise SourceError(f"{self.account / 'ca.crt'}: {error}; expected certificates in PEM") from None
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {token}"},
            transport=httpx.AsyncHTTPTransport(verify=tls or False, trust_env=False, socket_options=_ALIVE),
            timeout=_TIMEOUT,
            trust_env=False,
        )

    async def namespace(self) -> str:
        """Return the namespace that the gateway runs in, if the settings name none."""
        return await self._read("namespace")

    async def _read(self, name: str) -> str:
        try:
            return (await asyncio.to_thread(read_text, self.account / name, _MOST_FILE_BYTES)).strip()
        except OSError as error:
            raise SourceError(f"the service account's {name} cannot be read: {error}") from None


class _ExpiredError(Exception):
    """Raised if the API server no longer has a version of the list."""


class Objects(Generic[Kept]):
    """The current objects of one kind in a namespace."""

    def __init__(
        self,
        api: ApiServer,
        resource: str,
        namespace: str,
        query: Mapping[str, str],
        keep: Callable[[dict[str, Any]], Kept],
    ) -> None:
        name, _, group = resource.partition(".")
        self.kept: dict[str, Kept] = {}  # what is kept of each object, by name
        self._api = api
        self._path = f"/apis/{group}" if group else "/api"
        self._path += f"/v1/namespaces/{namespace}/{name}"
        self._what = f"{resource} in the namespace {namespace}"
        self._query = dict(query)  # which objects: `labelSelector` or `fieldSelector`
        self._keep = keep  # returns what to keep of an object; other changes are ignored
        self._resource_version = ""  # to watch from; empty if the objects must be listed

    async def changes(self) -> AsyncGenerator[None]:
        """List the objects; yield after that, and after each event that changes them, forever."""
        while True:
            began_s = time.monotonic()
            try:
                async with await self._api.client() as client:
                    if not self._resource_version:
                        await self._list(client)
                        yield
                    async for event in self._events(client):
                        if self._apply(event):
                            yield
            except _ExpiredError:
                self._resource_version = ""
            except (httpx.HTTPError, ssl.SSLError) as error:
                raise SourceError(f"{type(error).__name__}: {error}") from None
            except UNEXPECTED as error:
                raise SourceError(f"the API server's answer is not as expected: {error!r}") from None
            await asyncio.sleep(began_s + _SHORTEST_S - time.monotonic())

    async def _list(self, client: httpx.AsyncClient) -> None:
        kept: dict[str, Kept] = {}
        version = page = ""
        while not version or page:
            query = self._query | {"limit": str(_PAGE)} | ({"continue": page} if page else {})
            async with client.stream("GET", self._path, params=query) as answer:
                self._check(answer)
                body = bytearray()
                async for part in answer.aiter_bytes():
                    body += part
                    _check_size(len(body))
            document = json.loads(bytes(body))
            for each in document["items"] or ():
                self._keep_in(kept, each["metadata"]["name"], each)
            version, page = str(document["metadata"]["resourceVersion"]), document["metadata"].get("continue") or ""
        self.kept, self._resource_version = kept, version

    async def _events(self, client: httpx.AsyncClient) -> AsyncIterator[dict[str, Any]]:
        query = self._query | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._resource_version,
            "timeoutSeconds": str(_WATCH_S),
        }
        async with client.stream("GET", self._path, params=query) as answer:
            self._check(answer)
            rest = bytearray()
            async for part in answer.aiter_bytes():
                rest += part
                *lines, last = rest.split(b"\n")
                rest = bytearray(last)
                _check_size(len(rest))
                for line in lines:
                    if line.strip():
                        yield json.loads(line)

    def _apply(self, event: dict[str, Any]) -> bool:
        """Apply an event; return whether it changed what is kept."""
        kind, found = event["type"], event["object"]
        if kind == "ERROR":
            if found.get("code") == _GONE:
                raise _ExpiredError
            raise SourceError(f"the watch has failed: {found.get('message', found.get('reason'))}")
        self._resource_version = str(found["metadata"]["resourceVersion"])
        name = found["metadata"].get("name")
        before = dict(self.kept)
        if kind == "DELETED":
            self.kept.pop(name, None)
        elif kind in {"ADDED", "MODIFIED"}:
            self._keep_in(self.kept, name, found)
        return self.kept != before

    def _keep_in(self, kept: dict[str, Kept], name: str, found: dict[str, Any]) -> None:
        """Keep an object; leave out one in an unexpected form, but no other."""
        kept.pop(name, None)
        with background.guarded("discovery", of=f"{name} of the {self._what}"):
            kept[name] = self._keep(found)

    def _check(self, answer: httpx.Response) -> None:
        status = answer.status_code
        if status == _GONE:
            raise _ExpiredError
        if status in {401, 403}:
            needed = f"the service account needs `list` and `watch` of {self._what}"
            raise SourceError(f"the API server answered {status}: {needed}")
        if status == 404:
            raise SourceError(f"the API server answered 404: it knows no {self._what}; install their definition (CRD)")
        if status != 200:
            raise SourceError(f"the API server answered {status}")


def _check_size(size_bytes: int) -> None:
    if size_bytes > _MOST_BYTES:
        raise SourceError(f"the API server sent more than {_MOST_BYTES} bytes at once")
