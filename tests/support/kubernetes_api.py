"""A server that plays the API server of Kubernetes, with lists and watches as they were recorded.

The objects have the form of the API references for `EndpointSlice` (`discovery.k8s.io/v1`), `Pod` (`v1`) and
`InferencePool` (`inference.networking.k8s.io/v1`), as far as it matters to a gateway.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from tests.support.upstream import Upstream, Wire

End = None
"""Ends a watch, as a time-out does."""
Event = dict[str, Any] | bytes | None
SLICES = "/apis/discovery.k8s.io/v1/namespaces/inference/endpointslices"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/inference/inferencepools"
PODS = "/api/v1/namespaces/inference/pods"


def endpoint(address: str, pod: str, *, ready: bool | None = True, terminating: bool = False) -> dict[str, Any]:
    return {
        "addresses": [address],
        "conditions": {"ready": ready, "serving": ready, "terminating": terminating},
        "targetRef": {"kind": "Pod", "namespace": "inference", "name": pod},
    }


def endpoint_slice(name: str, version: str, *endpoints: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "inference", "resourceVersion": version},
        "addressType": "IPv4",
        "endpoints": list(endpoints) or None,
        "ports": [{"name": "http", "protocol": "TCP", "port": 8000}, {"name": "metrics", "protocol": "TCP", "port": 9}],
    }


def pod(
    name: str, address: str | None, labels: dict[str, str], *, ready: str = "True", ending: bool = False
) -> dict[str, Any]:
    """A pod; of its `labels` those with `{` in their text are annotations."""
    texts = {f"speculation.gateway/{key}": text for key, text in labels.items()}
    ended = {"deletionTimestamp": "2026-11-01T00:00:00Z"} if ending else {}
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "inference",
            "resourceVersion": "7",
            "labels": {"app": "vllm"} | {key: text for key, text in texts.items() if "{" not in text},
            "annotations": {key: text for key, text in texts.items() if "{" in text},
            **ended,
        },
        "status": {
            "conditions": [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": ready}],
            **({"podIP": address} if address else {}),
        },
    }


def inference_pool(version: str, *ports: int, app: str = "vllm", accepted: str = "True") -> dict[str, Any]:
    parent = {"parentRef": {"name": "gateway"}, "conditions": [{"type": "Accepted", "status": accepted}]}
    return {
        "kind": "InferencePool",
        "metadata": {"name": "llama", "namespace": "inference", "resourceVersion": version},
        "spec": {
            "selector": {"matchLabels": {"app": app, "part": "engine"}},
            "targetPorts": [{"number": port} for port in ports or (8000,)],
        },
        "status": {"parents": [parent]},
    }


def listed(version: str, *items: dict[str, Any], more: str = "") -> dict[str, Any]:
    metadata = {"resourceVersion": version} | ({"continue": more, "remainingItemCount": 1} if more else {})
    return {"kind": "List", "metadata": metadata, "items": [*items]}


def event(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "object": found}


def bookmark(version: str) -> dict[str, Any]:
    return event("BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": version}, "endpoints": None})


def expired() -> dict[str, Any]:
    status = {"message": "too old resource version: 5 (900)", "reason": "Expired", "code": 410}
    return event("ERROR", {"kind": "Status", "metadata": {}, "status": "Failure", **status})


@dataclass
class Script:
    """What the server answers for the objects of one kind.

    Attributes
    ----------
    lists
        Answers to requests for a list, in turn; the last one again and again. A number is an error of this status.
    asked
        The query of each request: `resourceVersion` and so on.
    """

    lists: list[dict[str, Any] | int]
    asked: list[dict[str, str]] = field(default_factory=list)
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    def send(self, *events: Event) -> None:
        """Send events to the watch that runs, or to the next one; bytes cut the connection after them."""
        for each in events:
            self.events.put_nowait(each)

    @property
    def watches(self) -> list[str]:
        """The versions that watches began with."""
        return [query["resourceVersion"] for query in self.asked if query.get("watch") == "true"]


@dataclass
class KubernetesApi:
    """The server, and the files of the service account with which a pod reaches it.

    Attributes
    ----------
    account
        The folder of the service account.
    scripts
        What the server answers, by path.
    token
        The token that it accepts.
    """

    account: Path
    scripts: dict[str, Script]
    token: str = "token-1"

    def __post_init__(self) -> None:
        self._server = Upstream("kubernetes", "", self._answer)

    @property
    def url(self) -> str:
        return self._server.url

    async def __aenter__(self) -> Self:
        self.account.mkdir(exist_ok=True)
        (self.account / "namespace").write_text("inference")
        (self.account / "token").write_text(f"{self.token}\n")
        await self._server.listen(int(self.url.rpartition(":")[2] or 0))  # the same port if it is started again
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.die()

    async def _answer(self, wire: Wire) -> None:
        target = urlsplit(wire.seen.target)
        query = {name: values[0] for name, values in parse_qs(target.query).items()}
        script = self.scripts[target.path]
        script.asked.append(query)
        if wire.seen.header("authorization") != f"Bearer {self.token}":
            await wire.json({"kind": "Status", "code": 401}, 401)
        elif query.get("watch") == "true":
            await _watch(script, wire)
        else:
            answer = script.lists.pop(0) if len(script.lists) > 1 else script.lists[0]
            status = answer if isinstance(answer, int) else 200
            await wire.json(answer if isinstance(answer, dict) else {"kind": "Status", "code": status}, status)


async def _watch(script: Script, wire: Wire) -> None:
    await wire.begin_stream()
    left = asyncio.create_task(wire.reader.read(1))  # nothing comes but the end of the connection
    try:
        while True:
            event = asyncio.create_task(script.events.get())
            await asyncio.wait({left, event}, return_when=asyncio.FIRST_COMPLETED)
            if not event.done():
                event.cancel()
                raise ConnectionResetError
            if (found := event.result()) is End:
                break
            await wire.chunk(found if isinstance(found, bytes) else json.dumps(found).encode() + b"\n")
            if isinstance(found, bytes):
                wire.reset()
                raise ConnectionResetError
    finally:
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
    await wire.end_stream()
