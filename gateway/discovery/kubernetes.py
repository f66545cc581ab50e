"""Replicas from Kubernetes: the ready endpoints in the EndpointSlices of a service.

The slices are listed once and then watched from the version of that list on [1]_. A watch that ends is taken up again
where it was; if the API server does not know that version any more (410), the slices are listed again.

References
----------
.. [1] Kubernetes, "API Concepts: Efficient detection of changes", https://kubernetes.io/docs/reference/using-api/api-concepts/
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gateway.discovery.source import Replica, Report, SourceError, replica_at

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_WATCH_S = 290
"""Seconds after which a watch is begun again, with the token as it is then: tokens are replaced within the hour."""
_PAGE = 500
_MOST_BYTES = 32 * 2**20
"""Of one page of a list, and of one event; a slice holds at most 1,000 endpoints."""
_TIMEOUT = httpx.Timeout(10.0, read=_WATCH_S + 30.0)
_GONE = 410


@dataclass(frozen=True, slots=True)
class ApiServer:
    """The API server, and the files of the service account that the gateway runs as.

    Parameters
    ----------
    url
        Its address.
    account
        Folder with `token`, `ca.crt` and `namespace`. They are read again for each list and watch.
    """

    url: str
    account: Path = _ACCOUNT

    @classmethod
    def of_cluster(cls, environ: Mapping[str, str] = os.environ) -> ApiServer:
        """Return the API server of the cluster that this process runs in.

        Raises
        ------
        SourceError
            If it does not run in one.
        """
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise SourceError("KUBERNETES_SERVICE_HOST is not set: the gateway does not run in a cluster")
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")

    def client(self) -> httpx.AsyncClient:
        """Return a client with the token and the authority as they are now."""
        try:
            token = (self.account / "token").read_text("ascii").strip()
            tls = self.url.startswith("https:") and ssl.create_default_context(cafile=str(self.account / "ca.crt"))
        except (OSError, ValueError) as error:
            raise SourceError(f"the service account's files cannot be read: {error}") from None
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {token}"},
            verify=tls,
            timeout=_TIMEOUT,
            trust_env=False,
        )

    def namespace(self) -> str:
        """Return the namespace that the gateway runs in."""
        try:
            return (self.account / "namespace").read_text("utf-8").strip()
        except OSError as error:
            raise SourceError(f"the namespace cannot be read, so set it: {error}") from None


class _ExpiredError(Exception):
    """Raised if a version of the list is not known any more."""


class KubernetesSource:
    """The replicas behind a service.

    Parameters
    ----------
    namespace
        None for that of the gateway.
    port
        Name or number of the port.
    api
        None for the API server of the cluster that the gateway runs in.
    """

    def __init__(self, service: str, namespace: str | None, port: str | int, api: ApiServer | None = None) -> None:
        self._service = service
        self._namespace = namespace
        self._port = port
        self._api = api
        self._slices: dict[str, dict[str, Any]] = {}
        self._version = ""

    async def follow(self, report: Report) -> None:
        """List the slices, and report again at each event that changes them."""
        api = self._api or ApiServer.of_cluster()
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace or api.namespace()}/endpointslices"
        self._version = ""
        while True:
            try:
                async with api.client() as client:
                    if not self._version:
                        await self._list(client, path)
                        report(self._replicas())
                    async for event in self._events(client, path):
                        if self._apply(event):
                            report(self._replicas())
            except _ExpiredError:
                self._version = ""
            except (httpx.HTTPError, ssl.SSLError) as error:
                raise SourceError(f"{type(error).__name__}: {error}") from None
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise SourceError(f"the API server's answer is not as expected: {error!r}") from None

    async def _list(self, client: httpx.AsyncClient, path: str) -> None:
        slices: dict[str, dict[str, Any]] = {}
        version = page = ""
        while not version or page:
            query = self._query(limit=str(_PAGE)) | ({"continue": page} if page else {})
            async with client.stream("GET", path, params=query) as answer:
                _check(answer)
                body = bytearray()
                async for part in answer.aiter_bytes():
                    body += part
                    _check_size(len(body))
            document = json.loads(bytes(body))
            for each in document["items"] or ():
                slices[each["metadata"]["name"]] = each
            version, page = str(document["metadata"]["resourceVersion"]), document["metadata"].get("continue") or ""
        self._slices, self._version = slices, version

    async def _events(self, client: httpx.AsyncClient, path: str) -> AsyncIterator[dict[str, Any]]:
        query = self._query(
            watch="true", allowWatchBookmarks="true", resourceVersion=self._version, timeoutSeconds=str(_WATCH_S)
        )
        async with client.stream("GET", path, params=query) as answer:
            _check(answer)
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
        """Apply an event; return whether it may have changed the replicas."""
        kind, found = event["type"], event["object"]
        if kind == "ERROR":
            if found.get("code") == _GONE:
                raise _ExpiredError
            raise SourceError(f"the watch has failed: {found.get('message', found.get('reason'))}")
        self._version = str(found["metadata"]["resourceVersion"])
        name = found["metadata"].get("name")
        if kind == "DELETED":
            self._slices.pop(name, None)
        elif kind in {"ADDED", "MODIFIED"}:
            self._slices[name] = found
        return bool(kind != "BOOKMARK")

    def _query(self, **more: str) -> dict[str, str]:
        return {"labelSelector": f"kubernetes.io/service-name={self._service}"} | more

    def _replicas(self) -> list[Replica]:
        """Return the ready endpoints, which have one slice or, while they move, two."""
        found: dict[str, Replica] = {}
        for each in self._slices.values():
            port = self._port_of(each)
            if port is None or each.get("addressType") not in {"IPv4", "IPv6"}:
                continue
            for endpoint in each.get("endpoints") or ():
                conditions = endpoint.get("conditions") or {}
                if conditions.get("ready") is False or conditions.get("terminating"):
                    continue
                replica = replica_at(endpoint["addresses"][0], port)  # further addresses are those of the same endpoint
                target = endpoint.get("targetRef") or {}
                if target.get("kind") == "Pod":
                    replica = replica._replace(name=target["name"])
                found.setdefault(replica.name, replica)
        return sorted(found.values())

    def _port_of(self, found: dict[str, Any]) -> int | None:
        for port in found.get("ports") or ():
            if self._port in {port.get("name"), port.get("port")}:
                return int(port["port"])
        return None


def _check(answer: httpx.Response) -> None:
    if answer.status_code == _GONE:
        raise _ExpiredError
    if answer.status_code in {401, 403}:
        raise SourceError(
            f"the API server answered {answer.status_code}: the service account needs `list` and `watch` of "
            "endpointslices.discovery.k8s.io in this namespace"
        )
    if answer.status_code != 200:
        raise SourceError(f"the API server answered {answer.status_code}")


def _check_size(size_bytes: int) -> None:
    if size_bytes > _MOST_BYTES:
        raise SourceError(f"the API server sent more than {_MOST_BYTES} bytes at once")
