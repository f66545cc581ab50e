"""A server that plays the API server of Kubernetes for one Deployment, which rolls out in scripted steps.

The objects have the form of the API reference for `Deployment`, `apps/v1`. A patch is merged as the reference says of a
strategic merge patch: containers by their name, lists of arguments as a whole.
"""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import dataclass, field
from typing import Any

from tests.support.api_server import ApiServer

READY = {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, "availableReplicas": 1}
SURGE = {"replicas": 2, "updatedReplicas": 1, "readyReplicas": 1, "availableReplicas": 1, "unavailableReplicas": 1}
DOWN = {"replicas": 1, "updatedReplicas": 1, "unavailableReplicas": 1}
STUCK = DOWN | {
    "conditions": [
        {"type": "Available", "status": "False", "reason": "MinimumReplicasUnavailable"},
        {
            "type": "Progressing",
            "status": "False",
            "reason": "ProgressDeadlineExceeded",
            "message": 'ReplicaSet "vllm-7c" has timed out progressing.',
        },
    ]
}


def deployment(*arguments: str, command: list[str] | None = None, replicas: int = 1) -> dict[str, Any]:
    serving: dict[str, Any] = {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": list(arguments)}
    serving |= {} if command is None else {"command": command}
    return {
        "kind": "Deployment",
        "apiVersion": "apps/v1",
        "metadata": {"name": "vllm", "namespace": "inference", "resourceVersion": "10", "generation": 3},
        "spec": {
            "replicas": replicas,
            "strategy": {"type": "Recreate"},
            "template": {"spec": {"containers": [serving, {"name": "exporter", "image": "exporter:1"}]}},
        },
        "status": {"observedGeneration": 3, **READY},
    }


@dataclass
class DeploymentApi(ApiServer):
    """The server.

    Attributes
    ----------
    rollout
        Statuses after each patch, in turn; the last one again and again.
    patches
        The bodies of all patches.
    status
        Status of the answers; the script of an error.
    """

    found: dict[str, Any]
    rollout: list[dict[str, Any]] = field(default_factory=lambda: [DOWN, READY])
    patches: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    conflicts: bool = False
    _left: list[dict[str, Any]] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        arguments: list[str] = self.found["spec"]["template"]["spec"]["containers"][0]["args"]
        return arguments

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, target, _ = head[0].split(" ")
        assert target == "/apis/apps/v1/namespaces/inference/deployments/vllm"
        status = self.status if headers["authorization"] == f"Bearer {self.token}" else 401
        if status == 200 and method == "PATCH":
            assert headers["content-type"] == "application/strategic-merge-patch+json"
            status = self._patch(json.loads(body))
        elif self._left:
            self.found["status"] = {
                "observedGeneration": self.found["metadata"]["generation"],
                **(self._left.pop(0) if len(self._left) > 1 else self._left[0]),
            }
        document = self.found if status == 200 else {"kind": "Status", "code": status}
        text = json.dumps(document).encode()
        fields = f"content-type: application/json\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n"
        writer.write(f"HTTP/1.1 {status} X\r\n{fields}".encode() + text)
        await writer.drain()

    def _patch(self, patch: dict[str, Any]) -> int:
        metadata = self.found["metadata"]
        if self.conflicts or patch["metadata"]["resourceVersion"] != metadata["resourceVersion"]:
            return 409
        self.patches.append(copy.deepcopy(patch))
        for change in patch["spec"]["template"]["spec"]["containers"]:
            for container in self.found["spec"]["template"]["spec"]["containers"]:
                if container["name"] == change["name"]:
                    container.update(change)
        metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)
        metadata["generation"] += 1
        stale = {**READY, "observedGeneration": metadata["generation"] - 1}  # the controller has not looked yet
        self._left = [stale, *self.rollout]
        return 200
