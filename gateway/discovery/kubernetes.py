"""Replicas from Kubernetes: the ready endpoints in the EndpointSlices of a service."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from backends import background
from gateway.discovery.api_server import ApiServer, Objects
from gateway.discovery.source import Replica, Report, replica_at


class KubernetesSource:
    """The replicas behind a service."""

    def __init__(self, service: str, namespace: str | None, port: str | int, api: ApiServer | None = None) -> None:
        self._service = service
        self._namespace = namespace  # none: the gateway's
        self._port = port  # name or number of the port
        self._api = api  # none for the API server of the cluster that the gateway runs in

    async def follow(self, report: Report) -> None:
        """Report the replicas, and again after each event that changes the slices."""
        api = self._api or ApiServer.of_cluster()
        selector = {"labelSelector": f"kubernetes.io/service-name={self._service}"}
        namespace = self._namespace or await api.namespace()
        slices = Objects(api, "endpointslices.discovery.k8s.io", namespace, selector, self._endpoints)
        async with aclosing(slices.changes()) as changes:
            async for _ in changes:
                found: dict[str, Replica] = {}  # an endpoint has a slice for each family, and two while it moves
                replicas = [replica for each in slices.kept.values() for replica in each]
                for replica in sorted(replicas, key=lambda each: each.url.startswith("http://[")):
                    found.setdefault(replica.name, replica)
                report(sorted(found.values()))

    def _endpoints(self, found: dict[str, Any]) -> list[Replica]:
        """Return the ready endpoints of a slice."""
        ports = found.get("ports") or ()
        port = next((int(port["port"]) for port in ports if self._port in {port.get("name"), port.get("port")}), None)
        if port is None or found.get("addressType") not in {"IPv4", "IPv6"}:
            return []
        replicas = []
        for endpoint in found.get("endpoints") or ():
            with background.guarded("discovery", of=f"an endpoint of {self._service}"):
                conditions = endpoint.get("conditions") or {}
                if conditions.get("ready") is False or conditions.get("terminating"):
                    continue
                replica = replica_at(endpoint["addresses"][0], port)  # further addresses are those of the same endpoint
                target = endpoint.get("targetRef") or {}
                replicas.append(replica._replace(name=target["name"]) if target.get("kind") == "Pod" else replica)
        return replicas
