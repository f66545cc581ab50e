"""Where replicas are found while the gateway runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from backends.speculation import Method, SpeculativeConfig
from backends.validation import Issue
from gateway.config.settings.backend import DrafterLimitSettings, issues_of_method
from gateway.config.settings.base import Secret, Settings

_KINDS = ("dns", "srv", "kubernetes", "inference_pool")
_Label = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)]


def _needs_dnspython(name: str) -> str:
    if find_spec("dns") is None:
        raise ValueError(
            "needs the package dnspython: pip install '.[discovery]' in a checkout (deploy/README.md#install)"
        )
    return name


def _checked_name_and_port(text: str) -> str:
    name, _, port = text.rpartition(":")
    if not name or ":" in name or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError("expected name:port, such as vllm.example:8000")
    return _needs_dnspython(text)


class KubernetesSettings(Settings):
    """A service in the cluster that the gateway runs in. Its ready endpoints are replicas.

    Parameters
    ----------
    service
        Name of the service.
    namespace
        Its namespace; null: the gateway's.
    port
        Name or number of the port of the endpoints.
    """

    service: _Label
    namespace: _Label | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | _Label


class InferencePoolSettings(Settings):
    """An InferencePool in the cluster that the gateway runs in. Its ready pods are replicas.

    Their labels say how they speculate: docs/kubernetes.md.

    Parameters
    ----------
    name
        Name of the InferencePool.
    namespace
        Its namespace; null: the gateway's.
    """

    name: _Label
    namespace: _Label | None = None


class DiscoverSettings(Settings):
    """A source of replicas, and exactly one of `dns`, `srv`, `kubernetes` and `inference_pool`.

    Parameters
    ----------
    dns
        `name:port`: each IPv4 address of the name is a replica, or each IPv6 address if it has no other.
    srv
        Name of SRV records: each target of the lowest priority is a replica.
    kubernetes
        A service in the cluster that the gateway runs in.
    inference_pool
        An InferencePool in the cluster that the gateway runs in.
    method
        How the replicas speculate. Those of an `inference_pool` say it themselves; this is then for pods without the
        label `speculation.gateway/method`, which are left out if it is null.
    speculative_config
        The replicas' `--speculative-config`, under vLLM's own keys.
    drafter_limit
        The longest context that their drafters serve, or a mapping: docs/configuration.md.
    draft_depth
        Whether their engines have the scheduler of deploy/vllm_draft_depth, and so draft as deep as each request asks.
    api_key
        Bearer token sent to the engines.
    weight
        Share of the requests of each replica relative to others, for policies that use weights.

    Examples
    --------
    >>> DiscoverSettings(method="baseline", kubernetes={"service": "vllm", "port": 8000}).kubernetes.port
    8000
    """

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": [kind] if kind == "inference_pool" else [kind, "method"]} for kind in _KINDS]
        }
    )

    dns: Annotated[str, AfterValidator(_checked_name_and_port)] | None = None
    srv: Annotated[str, Field(min_length=1), AfterValidator(_needs_dnspython)] | None = None
    kubernetes: KubernetesSettings | None = None
    inference_pool: InferencePoolSettings | None = None
    method: Method | None = None
    speculative_config: SpeculativeConfig | None = None
    drafter_limit: DrafterLimitSettings | None = None
    draft_depth: bool = False
    api_key: Secret = None
    weight: Annotated[float, Field(gt=0)] = 1.0

    @property
    def where(self) -> str:
        """Where the replicas are looked for, and which; the other settings say how they are used."""
        which = {"method", "speculative_config", "drafter_limit"} if self.inference_pool is not None else set()
        return self.model_dump_json(include={*_KINDS, *which})

    @property
    def of_unlabelled(self) -> dict[str, Any]:
        """The settings of an InferencePool's pods that have no labels; empty if those are left out."""
        if self.method is None:
            return {}
        return {key: getattr(self, key) for key in ("method", "speculative_config", "drafter_limit")}

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield an issue unless exactly one kind of source is set, and those of the method."""
        kinds = [kind for kind in _KINDS if data.get(kind) is not None]
        if not kinds:
            yield Issue((), "has none of dns, srv, kubernetes and inference_pool", "set one of them")
        for kind in kinds[1:]:
            yield Issue((kind,), f"set together with {kinds[0]}", "a source is one of the four", at_key=True)
        if data.get("method") is None and (
            data.get("speculative_config") is not None or kinds[:1] != ["inference_pool"]
        ):
            yield Issue(("method",), "missing")
        yield from issues_of_method(data, served=False)
