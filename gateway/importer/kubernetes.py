"""What two routers have in common: replicas that are found by labels, and names of policies."""

from __future__ import annotations

from collections.abc import Mapping

from backends.validation import UsageError
from gateway.importer.configuration import Configuration, Replica
from gateway.importer.pool_text import Variable


def labelled_source(
    configuration: Configuration,
    model: str | None,
    service: str | None,
    selector: str,
    port: int,
    namespace: str | None,
) -> Replica:
    """Return the source of replicas that were found by labels, which the gateway finds by a service."""
    name = service or Variable.of("VLLM_SERVICE")
    where = {"service": name, **({"namespace": namespace} if namespace else {}), "port": port}
    source = Replica(service or "kubernetes", model, {"kubernetes": where})
    configuration.placeholders["VLLM_SERVICE"] = "service"
    source.notes.append(
        f"replicas were found by the labels {selector or '(any)'}: make a Service with them as its selector"
        + ("" if service else " and set VLLM_SERVICE to its name (or give --service)")
        + "; the gateway needs deploy/kubernetes-rbac.yaml"
    )
    return source


def set_policy(configuration: Configuration, flag: str, value: str, policies: Mapping[str, tuple[str, str]]) -> None:
    """Set the policy that comes closest to a router's own."""
    if value not in policies:
        raise UsageError(f"{flag} {value}: expected one of {', '.join(policies)}")
    configuration.policy, configuration.policy_note = policies[value]
