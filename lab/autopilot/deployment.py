"""A Deployment of Kubernetes with one replica of vLLM, whose speculative config is an argument of its container [1]_.

References
----------
.. [1] Kubernetes API, "Deployment v1 apps",
   https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/deployment-v1/
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from backends.speculation import Method
from gateway.discovery.api_server import ApiServer
from gateway.discovery.source import SourceError
from lab.autopilot.gateway_admin import ChangeError
from lab.autopilot.journal import Speculation

_FLAGS = ("--speculative-config", "-sc")
_SUMMARY = "--per-request-spec-decode-metrics"
"""A baseline does not start with this one."""
_PATCH = "application/strategic-merge-patch+json"
_MOST_BYTES = 4 * 2**20
_LOOK_S = 2.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """One Deployment.

    Parameters
    ----------
    namespace
        None for that of the service account.
    container
        Name of the container that serves; None if it has only one.
    limit_s
        Seconds that a rollout may take.
    """

    api: ApiServer
    name: str
    namespace: str | None = None
    container: str | None = None
    limit_s: float = 900.0
    look_s: float = _LOOK_S

    async def check(self) -> None:
        """Check that the Deployment can be changed.

        Raises
        ------
        ChangeError
            If it cannot be read, is not one replica, or has no arguments that can be changed.
        """
        _changed(self._checked(await self._ask("GET")), self.container, Speculation(method=Method.BASELINE))

    async def run(self, runs: Speculation) -> None:
        """Change the arguments, and wait until the pod with them is available.

        Raises
        ------
        ChangeError
            If the API server refuses, or the rollout fails or does not end in time.
        """
        found = self._checked(await self._ask("GET"))
        container, arguments = _changed(found, self.container, runs)
        metadata = {"resourceVersion": found["metadata"]["resourceVersion"]}  # or the server refuses: 409
        spec = {"template": {"spec": {"containers": [{"name": container, "args": arguments}]}}}
        patched = await self._ask("PATCH", {"metadata": metadata, "spec": spec})
        generation = patched["metadata"]["generation"]
        end_s = time.monotonic() + self.limit_s
        while not self._is_rolled_out(found := await self._ask("GET"), generation):
            if time.monotonic() > end_s:
                raise ChangeError(f"the rollout of Deployment {self.name} has not ended within {self.limit_s:g} s")
            await asyncio.sleep(self.look_s)

    def _checked(self, found: dict[str, Any]) -> dict[str, Any]:
        replicas = found["spec"].get("replicas", 1)
        if replicas != 1:
            raise ChangeError(
                f"Deployment {self.name} has {replicas} replicas; give each its own, to restart one at a time"
            )
        return found

    def _is_rolled_out(self, found: dict[str, Any], generation: int) -> bool:
        """Return whether the rollout has ended, by the rules of `kubectl rollout status`."""
        status = found.get("status") or {}
        if found["metadata"]["generation"] != generation:
            raise ChangeError(f"Deployment {self.name} was changed by someone else meanwhile")
        if status.get("observedGeneration", 0) < generation:
            return False
        for condition in status.get("conditions") or ():
            if condition["type"] == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded":
                raise ChangeError(f"the rollout of Deployment {self.name} has failed: {condition.get('message', '')}")
        return all(status.get(key, 0) == 1 for key in ("replicas", "updatedReplicas", "availableReplicas"))

    async def _ask(self, method: str, body: object = None) -> dict[str, Any]:
        """Return the Deployment, as the API server answers with it."""
        try:
            path = f"/apis/apps/v1/namespaces/{self.namespace or self.api.namespace()}/deployments/{self.name}"
            async with self.api.client() as client:
                content = None if body is None else json.dumps(body)
                headers = {"content-type": _PATCH} if content else {}
                async with client.stream(method, path, content=content, headers=headers) as answer:
                    text = bytearray()
                    async for chunk in answer.aiter_bytes():
                        text += chunk
                        if len(text) > _MOST_BYTES:
                            raise ChangeError(f"the API server answered with more than {_MOST_BYTES} bytes")
            if answer.status_code in (401, 403):
                raise ChangeError(
                    f"the API server answered {answer.status_code}: the service account needs `get` and `patch` of "
                    f"deployments.apps, {self.name}"
                )
            if answer.status_code != httpx.codes.OK:
                raise ChangeError(f"the API server answered {answer.status_code} for Deployment {self.name}")
            found = json.loads(text)
            for part in ("metadata", "spec"):
                found[part].keys()
        except SourceError as error:
            raise ChangeError(str(error)) from None
        except httpx.HTTPError as error:
            raise ChangeError(f"the API server cannot be reached: {type(error).__name__} {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ChangeError(f"the API server's answer is not as expected: {error!r}") from None
        return dict(found)


def _changed(found: dict[str, Any], container: str | None, runs: Speculation) -> tuple[str, list[str]]:
    """Return the container that serves, and its arguments with another speculative config."""
    name = found["metadata"]["name"]
    containers = found["spec"]["template"]["spec"]["containers"]
    serving = [one for one in containers if container in (None, one["name"])]
    if len(serving) != 1:
        names = ", ".join(one["name"] for one in containers)
        raise ChangeError(f"Deployment {name}: name the container that serves, as NAME:CONTAINER; it has {names}")
    whole = [*(serving[0].get("command") or ()), *(serving[0].get("args") or ())]
    if whole and whole[0].rpartition("/")[2] in ("sh", "bash"):
        raise ChangeError(f"Deployment {name} starts a shell; write the arguments of `vllm serve` out in `args`")
    arguments = [str(one) for one in serving[0].get("args") or ()]
    if any(flag in part.partition("=")[0] for part in serving[0].get("command") or () for flag in _FLAGS):
        raise ChangeError(f"Deployment {name} has its --speculative-config in `command`; move it to `args`")
    kept = _without(_without(arguments, _FLAGS), (_SUMMARY,))
    if runs.method is Method.BASELINE:
        return str(serving[0]["name"]), kept
    shown = json.dumps({"method": runs.method.value, **runs.config})
    return str(serving[0]["name"]), [*kept, _FLAGS[0], shown, _SUMMARY, "summary"]


def _without(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return arguments without some flags and their values."""
    kept: list[str] = []
    skips = False
    for part in arguments:
        flag, _, value = part.partition("=")
        if flag.replace("_", "-") in flags:
            skips = not value
        elif skips:
            skips = False
        else:
            kept.append(part)
    return kept
