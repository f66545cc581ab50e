"""Replicas from Kubernetes: the pods of an InferencePool, whose labels say how they speculate.

The pool and the pods that its selector selects are followed [1]_. Each pod that is ready is a replica at each of the
pool's target ports.

References
----------
.. [1] Gateway API Inference Extension, "InferencePool", version v1 of `inference.networking.k8s.io`,
   https://gateway-api-inference-extension.sigs.k8s.io/reference/spec/
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple

from gateway.discovery.api_server import UNEXPECTED, ApiServer, Objects
from gateway.discovery.pods import Pod
from gateway.discovery.source import Replica, Report, SourceError, replica_at

log = logging.getLogger(__name__)


class _Pool(NamedTuple):
    """What of an InferencePool tells its replicas."""

    selector: str
    ports: tuple[int, ...]

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> _Pool | str:
        """Return the pool, or what is wrong with it."""
        try:
            spec = found["spec"]
            labels = spec["selector"]["matchLabels"]
            if not labels:
                raise ValueError("the selector is empty")
            selector = ",".join(f"{key}={label}" for key, label in sorted(labels.items()))
            return cls(selector, tuple(int(port["number"]) for port in spec["targetPorts"]))
        except UNEXPECTED as error:
            return repr(error)


class InferencePoolSource:
    """The replicas of an InferencePool."""

    def __init__(
        self, name: str, namespace: str | None, default: Mapping[str, Any], api: ApiServer | None = None
    ) -> None:
        self._name = name
        self._namespace = namespace  # none for that of the gateway
        # `method` and `speculative_config` of pods without the label `speculation.gateway/method`; empty if they are to
        # be left out.
        self._default = default
        self._api = api  # none for the API server of the cluster that the gateway runs in
        self._problems: dict[str, str] = {}

    async def follow(self, report: Report) -> None:
        """List the pods of the pool, and report again at each change of it or of them."""
        api = self._api or ApiServer.of_cluster()
        namespace = self._namespace or await api.namespace()
        query = {"fieldSelector": f"metadata.name={self._name}"}
        pools = Objects(api, "inferencepools.inference.networking.k8s.io", "v1", namespace, query, _Pool.of)
        task: asyncio.Task[None] | None = None
        try:
            async with asyncio.TaskGroup() as group, aclosing(pools.changes()) as changes:
                async for _ in changes:
                    pool = pools.kept.get(self._name)
                    if pool is None:
                        raise SourceError(f"there is no InferencePool {self._name} in the namespace {namespace}")
                    if isinstance(pool, str):
                        raise SourceError(f"the InferencePool {self._name} is not as expected: {pool}")
                    if task is not None:
                        task.cancel()
                    task = group.create_task(self._follow_pods(api, namespace, pool, report))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _follow_pods(self, api: ApiServer, namespace: str, pool: _Pool, report: Report) -> None:
        keep = partial(Pod.of, default=self._default)
        pods = Objects(api, "pods", "v1", namespace, {"labelSelector": pool.selector}, keep)
        async with aclosing(pods.changes()) as changes:
            async for _ in changes:
                report(self._replicas(pods.kept, pool.ports))

    def _replicas(self, pods: Mapping[str, Pod | None], ports: tuple[int, ...]) -> list[Replica]:
        ready = {name: pod for name, pod in sorted(pods.items()) if pod is not None}
        problems = {name: pod.problem for name, pod in ready.items() if pod.own is None}
        for name, problem in problems.items():
            if self._problems.get(name) != problem:
                log.warning("the pod %s of the InferencePool %s is left out: %s", name, self._name, problem)
        self._problems = problems
        return [
            Replica(name if len(ports) == 1 else f"{name}:{port}", replica_at(pod.address, port).url, pod.own)
            for name, pod in ready.items()
            if pod.own is not None
            for port in ports
        ]
