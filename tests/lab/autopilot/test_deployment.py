"""Restarting a Deployment of Kubernetes with another speculative config, with a scripted API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.speculation import Method
from gateway.discovery.api_server import ApiServer
from lab.autopilot.deployment import Deployment
from lab.autopilot.gateway_admin import ChangeError
from lab.autopilot.journal import Speculation
from tests.support.deployment_api import DOWN, READY, STUCK, SURGE, DeploymentApi, deployment

BASELINE = Speculation(method=Method.BASELINE)
NGRAM = Speculation(method=Method.NGRAM, config={"num_speculative_tokens": 5, "prompt_lookup_max": 4})
PLAIN = ("org/llama", "--max-model-len", "4096")
DRAFTS = (
    "--speculative-config",
    '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}',
    "--per-request-spec-decode-metrics",
    "summary",
)


def of(api: DeploymentApi, limit_s: float = 5.0, container: str | None = "vllm") -> Deployment:
    return Deployment(ApiServer(api.url, api.account), "vllm", None, container, limit_s, look_s=0.01)


@pytest.mark.parametrize(
    ("before", "runs", "after"),
    [
        (PLAIN, NGRAM, (*PLAIN, *DRAFTS)),
        ((*PLAIN, *DRAFTS), BASELINE, PLAIN),
        (("-sc", "{}", *PLAIN), NGRAM, (*PLAIN, *DRAFTS)),
        (("--speculative_config={}", *PLAIN, "--per-request-spec-decode-metrics=full"), NGRAM, (*PLAIN, *DRAFTS)),
    ],
)
async def test_only_the_arguments_for_drafts_change(tmp_path: Path, before: Any, runs: Speculation, after: Any) -> None:
    async with DeploymentApi(tmp_path / "account", deployment(*before), [SURGE, DOWN, READY]) as api:
        await of(api).check()
        assert api.patches == []
        await of(api).run(runs)
        assert (api.arguments, len(api.patches), api._left) == ([*after], 1, [READY])
        assert api.patches[0]["metadata"] == {"resourceVersion": "10"}


async def test_a_rollout_that_fails_or_does_not_end_is_told(tmp_path: Path) -> None:
    async with DeploymentApi(tmp_path / "account", deployment(*PLAIN), [DOWN, STUCK]) as api:
        with pytest.raises(ChangeError, match=r"has failed: ReplicaSet .* has timed out progressing"):
            await of(api).run(NGRAM)
        api.rollout = [DOWN]
        with pytest.raises(ChangeError, match=r"has not ended within 0\.1 s"):
            await of(api, limit_s=0.1).run(NGRAM)
        api.rollout = [READY]
        await of(api).run(BASELINE)  # as it is put back
        assert api.arguments == [*PLAIN]


async def test_what_cannot_be_changed_is_refused_before_a_patch(tmp_path: Path) -> None:
    async def problem(found: dict[str, Any], container: str | None = "vllm") -> str:
        async with DeploymentApi(tmp_path / "account", found) as api:
            with pytest.raises(ChangeError) as raised:
                await of(api, container=container).check()
            assert api.patches == []
            return str(raised.value)

    assert "has 3 replicas; give each its own" in await problem(deployment(*PLAIN, replicas=3))
    assert "name the container that serves, as NAME:CONTAINER; it has vllm, exporter" in await problem(
        deployment(*PLAIN), None
    )
    assert "starts a shell" in await problem(deployment("vllm serve org/llama", command=["/bin/sh", "-c"]))
    assert "move it to `args`" in await problem(deployment(command=["vllm", "serve", "--speculative-config", "{}"]))
    assert "not as expected" in await problem({"kind": "Status"})


async def test_errors_of_the_api_server_are_told_without_the_token(tmp_path: Path) -> None:
    async with DeploymentApi(tmp_path / "account", deployment(*PLAIN)) as api:
        for status, hint in ((403, "needs `get` and `patch` of deployments.apps"), (500, "answered 500")):
            api.status = status
            with pytest.raises(ChangeError, match=hint) as raised:
                await of(api).run(NGRAM)
            assert api.token not in str(raised.value)
        api.status, api.conflicts = 200, True
        with pytest.raises(ChangeError, match="answered 409"):  # someone else has changed it meanwhile
            await of(api).run(NGRAM)
        api.conflicts = False
        (api.account / "token").write_text("token-2")  # replaced within the hour: read again for each request
        api.token = "token-2"
        await of(api).run(NGRAM)
        assert api.arguments == [*PLAIN, *DRAFTS]
