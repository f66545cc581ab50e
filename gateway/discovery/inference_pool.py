"""Replicas from Kubernetes: the pods of an InferencePool, whose labels say how they speculate.

The source follows the pool and the pods that it selects [1]_. Each ready pod is a replica at each of the pool's target
ports.

References
----------
.. [1] Gateway API Inference Extension, "InferencePool", version v1 of `inference.networking.k8s.io`,
   https://gateway-api-inference-extension.sigs.k8s.io/reference/spec/
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any, NamedTuple

from pydantic import ValidationError

from backends.speculation import Method
from backends.validation import Issue, did_you_mean, issues_of
from gateway.config.settings import BackendSettings
from gateway.discovery.api_server import UNEXPECTED, ApiServer, Objects
from gateway.discovery.source import Replica, Report, SourceError, replica_at

PREFIX = "speculation.gateway/"
METHOD, TOKENS, CONFIG, WEIGHT = "method", "num-speculative-tokens", "speculative-config", "weight"
LIMIT, BEYOND, DEPTH = "drafter-limit", "beyond-drafter-limit", "draft-depth"
_KEYS = (METHOD, TOKENS, CONFIG, WEIGHT, LIMIT, BEYOND, DEPTH)
RANGE = "llm-d.ai/context-length-range"
"""A label of llm-d, read by its `context-length-aware` scorer."""


log = logging.getLogger(__name__)


class LabelError(Exception):
    """Raised if a pod's labels do not say how it speculates; the message says what would be right."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that takes requests."""

    address: str
    own: BackendSettings | None  # how it speculates; None if its labels do not say so
    problem: str = ""  # what is wrong with its labels

    @classmethod
    def of(cls, found: Mapping[str, Any], default: Mapping[str, Any]) -> Pod | None:
        """Return the pod in an object of the API server; None if it takes no requests: not ready, or terminating."""
        metadata, status = found["metadata"], found.get("status") or {}
        ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions") or ())
        if metadata.get("deletionTimestamp") or not ready or not status.get("podIP"):
            return None
        texts = (metadata.get("annotations") or {}) | (metadata.get("labels") or {})
        said = {key.removeprefix(PREFIX): text for key, text in texts.items() if key.startswith(PREFIX)}
        address = str(ip_address(status["podIP"]))
        try:
            return cls(address, settings_of(said, default, texts.get(RANGE)))
        except LabelError as error:
            return cls(address, None, str(error))


def settings_of(
    said: Mapping[str, str], default: Mapping[str, Any], context_range: str | None = None
) -> BackendSettings:
    """Return a replica's settings from the labels of its pod, including llm-d's; their `url` is a placeholder.

    Examples
    --------
    >>> settings_of({"method": "eagle3", "num-speculative-tokens": "3"}, {}).method
    <Method.EAGLE3: 'eagle3'>
    """
    for key in said:
        if key not in _KEYS:
            raise LabelError(f"{PREFIX}{key}: no such label; {did_you_mean(key, _KEYS)}")
    data: dict[str, Any] = {"url": "http://pod", "context_range": context_range}
    if METHOD in said:
        data |= {"method": said[METHOD], "speculative_config": _config(said)}
    elif default and not {TOKENS, CONFIG} & said.keys():
        data |= default
    else:
        raise LabelError(f"it has no label {PREFIX}{METHOD}; set it to one of {', '.join(Method)}")
    if WEIGHT in said:
        data["weight"] = said[WEIGHT]
    if DEPTH in said:
        data["draft_depth"] = said[DEPTH]
    if LIMIT in said or BEYOND in said:
        data["drafter_limit"] = {"tokens": said.get(LIMIT), "beyond": said.get(BEYOND)}
    try:
        return BackendSettings.model_validate(data)
    except ValidationError as error:
        raise LabelError("; ".join(_text(issue) for issue in issues_of(error, BackendSettings))) from None


def _config(said: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the speculative config that two of the labels give."""
    if CONFIG not in said and TOKENS not in said:
        return None
    try:
        config = json.loads(said.get(CONFIG, "{}"))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise LabelError(f"{PREFIX}{CONFIG}: expected a JSON object, as of vLLM's --speculative-config")
    if TOKENS in said and str(config.setdefault("num_speculative_tokens", said[TOKENS])) != said[TOKENS]:
        raise LabelError(f"{PREFIX}{TOKENS}: differs from num_speculative_tokens in {PREFIX}{CONFIG}; remove one")
    return config


def _text(issue: Issue) -> str:
    """Return an issue of the settings in terms of the labels."""
    first, *rest = issue.path or ("",)
    if first == "context_range":
        return f"{RANGE}: expected tokens, such as 0-4096"
    key = {"method": METHOD, "weight": WEIGHT, "drafter_limit": LIMIT, "draft_depth": DEPTH}.get(str(first), CONFIG)
    if rest in (["num_speculative_tokens"], ["tokens"], ["beyond"]):
        key, rest = {"tokens": LIMIT, "beyond": BEYOND}.get(str(rest[0]), TOKENS), []
    path = "".join(f".{part}" for part in rest)
    return f"{PREFIX}{key}{path}: {issue.message}" + (f"; {issue.hint}" if issue.hint else "")


class _Pool(NamedTuple):
    """The part of an InferencePool that determines its replicas."""

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
        self._namespace = namespace  # none: the gateway's
        # `method` and `speculative_config` of pods without the label `speculation.gateway/method`; empty if they should
        # be left out.
        self._default = default
        self._api = api  # none for the API server of the cluster that the gateway runs in
        self._problems: dict[str, str] = {}

    async def follow(self, report: Report) -> None:
        """Report the replicas, and again after each change of the pool or its pods."""
        api = self._api or ApiServer.of_cluster()
        namespace = self._namespace or await api.namespace()
        query = {"fieldSelector": f"metadata.name={self._name}"}
        pools = Objects(api, "inferencepools.inference.networking.k8s.io", namespace, query, _Pool.of)
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
        pods = Objects(api, "pods", namespace, {"labelSelector": pool.selector}, keep)
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
