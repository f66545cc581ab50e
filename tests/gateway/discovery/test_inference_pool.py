"""Replicas from the pods of an InferencePool, with a played API server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from backends.drafter_limit import Beyond, DrafterLimit
from backends.speculation import Method
from backends.validation import issues_of
from gateway.config.pool_file import PoolFile
from gateway.config.settings import DiscoverSettings
from gateway.discovery import discovery
from gateway.discovery.api_server import ApiServer
from gateway.discovery.inference_pool import InferencePoolSource, Pod
from gateway.discovery.source import Replica, SourceError
from gateway.service.replicas import plan
from tests.gateway.discovery.followed import following
from tests.support.kubernetes_api import PODS, POOLS, KubernetesApi, Script, event, inference_pool, listed, pod
from tests.support.waiting import eventually, stays

PLAIN = pod("plain-0", "10.0.0.1", {"method": "baseline"})
HEAD = pod("head-0", "10.0.0.2", {"method": "eagle3", "num-speculative-tokens": "3", "weight": "2"})
BARE = pod("bare-0", "10.0.0.3", {})


def api_of(tmp_path: Path, pool: dict[str, Any] | int, *pods: dict[str, Any]) -> KubernetesApi:
    found = pool if isinstance(pool, int) else listed("5", pool)
    return KubernetesApi(tmp_path / "account", {POOLS: Script([found]), PODS: Script([listed("6", *pods)])})


def of(api: KubernetesApi) -> InferencePoolSource:
    return InferencePoolSource("llama", None, {}, ApiServer(api.url, api.account))


async def test_each_ready_pod_is_a_replica_at_each_port_with_the_method_of_its_labels(tmp_path: Path) -> None:
    late = pod("late", "10.0.0.8", {"method": "baseline"}, ready="False")
    api = api_of(tmp_path, inference_pool("3", 8000, 8001), PLAIN, HEAD, late)
    async with api, following(of(api)) as it:
        found = await it.until("plain-0:8000", "plain-0:8001", "head-0:8000", "head-0:8001")
        assert found["head-0:8001"].url == "http://10.0.0.2:8001"
        own = found["head-0:8001"].own
        assert own.method is Method.EAGLE3
        assert api.scripts[POOLS].asked[0]["fieldSelector"] == "metadata.name=llama"
        assert api.scripts[PODS].asked[0]["labelSelector"] == "app=vllm,part=engine"


async def test_a_pod_that_is_not_as_expected_is_left_out_alone(tmp_path: Path) -> None:
    odd = [pod("odd-0", "not an address", {"method": "suffix"}), PLAIN | {"metadata": {"name": "odd-1"}, "status": 7}]
    async with api_of(tmp_path, inference_pool("3"), *odd, PLAIN) as api, following(of(api)) as it:
        await it.until("plain-0")
        api.scripts[PODS].send(event("ADDED", HEAD))
        await it.until("plain-0", "head-0")


async def test_pods_and_labels_come_and_go(tmp_path: Path) -> None:
    api = api_of(tmp_path, inference_pool("3"), PLAIN)
    async with api, following(of(api)) as it:
        await it.until("plain-0")
        api.scripts[PODS].send(event("ADDED", HEAD))
        await it.until("plain-0", "head-0")
        count = len(it.reports)
        same = HEAD | {"status": HEAD["status"] | {"hostIP": "10.1.0.1"}}
        api.scripts[PODS].send(event("MODIFIED", same))
        api.scripts[PODS].send(event("MODIFIED", pod("plain-0", "10.0.0.1", {"method": "suffix"})))
        await eventually(lambda: it.reports[-1]["plain-0"].own.method is Method.SUFFIX)
        assert len(it.reports) == count + 1, "what does not concern its requests changes nothing"
        api.scripts[PODS].send(event("MODIFIED", pod("head-0", "10.0.0.2", {}, ending=True)))
        await it.until("plain-0")


async def test_a_changed_pool_has_other_pods_and_ports(tmp_path: Path) -> None:
    api = api_of(tmp_path, inference_pool("3"), PLAIN)
    async with api, following(of(api)) as it:
        await it.until("plain-0")
        await eventually(lambda: len(api.scripts[PODS].watches) == 1)
        api.scripts[POOLS].send(event("MODIFIED", inference_pool("7", accepted="False")))
        await stays(lambda: len(api.scripts[PODS].asked) == 2, 0.1, what="its status alone changes nothing")
        api.scripts[PODS].lists = [listed("8", HEAD)]
        api.scripts[POOLS].send(event("MODIFIED", inference_pool("9", 8000, 9000, app="other")))
        await it.until("head-0:8000", "head-0:9000")
        selectors = [query["labelSelector"] for query in api.scripts[PODS].asked if "watch" not in query]
        assert selectors == ["app=vllm,part=engine", "app=other,part=engine"]
        api.scripts[PODS].send(event("ADDED", PLAIN))
        await it.until("head-0:8000", "head-0:9000", "plain-0:8000", "plain-0:9000")


async def test_a_pod_whose_labels_are_wrong_is_left_out_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api = api_of(tmp_path, inference_pool("3"), PLAIN, BARE)
    async with api, following(of(api)) as it:
        await it.until("plain-0")
        api.scripts[PODS].send(event("ADDED", HEAD))
        await it.until("plain-0", "head-0")
        (message,) = caplog.messages
        assert "the pod bare-0 of the InferencePool llama is left out: it has no label speculation.gateway/" in message
        api.scripts[PODS].send(event("MODIFIED", pod("bare-0", "10.0.0.3", {"method": "n-gram"})))
        await eventually(lambda: "did you mean 'ngram'?" in caplog.text)
        api.scripts[PODS].send(event("MODIFIED", pod("bare-0", "10.0.0.3", {"method": "suffix"})))
        await it.until("plain-0", "head-0", "bare-0")
        assert len(caplog.messages) == 2


@pytest.mark.parametrize(
    ("pool", "pods", "message"),
    [
        (403, [], "403.* `list` and `watch` of inferencepools.inference.networking.k8s.io in the namespace inference"),
        (404, [], "knows no inferencepools.inference.networking.k8s.io .*install their definition"),
        (inference_pool("3"), [403], "403.* `list` and `watch` of pods in the namespace inference"),
        ({"metadata": {"name": "llama"}, "spec": {}}, [], "not as expected: KeyError\\('selector'\\)"),
    ],
)
async def test_what_is_missing_is_told(
    tmp_path: Path, pool: dict[str, Any] | int, pods: list[int], message: str
) -> None:
    api = api_of(tmp_path, pool)
    api.scripts[PODS].lists[:0] = pods
    async with api, following(of(api)) as it:
        with pytest.raises(SourceError, match=message):
            await asyncio.wait_for(it.task, 20)


def test_a_pod_is_as_its_labels_say_and_what_they_cannot_say_as_its_source_does(tmp_path: Path) -> None:
    drafts = {"speculative_config": {"num_speculative_tokens": 5}, "draft_depth": True, "drafter_limit": 300}
    source = {"inference_pool": {"name": "llama"}, "method": "eagle3", "api_key": "k", "weight": 3} | drafts
    settings = PoolFile.model_validate({"models": {"m": {"discover": {"fleet": source}}}})
    default, found = settings.models["m"].discover["fleet"].of_unlabelled, []
    limited = {
        "method": "eagle3",
        "num-speculative-tokens": "3",
        "drafter-limit": "20",
        "beyond-drafter-limit": "batch",
    }
    for each in (PLAIN, HEAD, BARE, pod("limited-0", "10.0.0.4", limited)):
        kept = Pod.of(each, default)
        found.append(Replica(each["metadata"]["name"], f"http://{kept.address}", kept.own))
    planned = plan(settings, tmp_path, None, {("m", "fleet"): found}).backends
    assert {(each.api_key, each.draft_depth == (each.method is Method.EAGLE3)) for each in planned} == {("k", True)}
    own = DrafterLimit(300, Beyond.WORSE)
    assert {
        each.name: (each.num_speculative_tokens, each.weight, each.drafter_limit, each.asks_version) for each in planned
    } == {
        "fleet/bare-0": (5, 3.0, own, True),
        "fleet/head-0": (3, 2.0, own, True),
        "fleet/limited-0": (3, 3.0, DrafterLimit(20), False),
        "fleet/plain-0": (0, 3.0, None, True),
    }


async def test_a_pool_that_is_gone_is_no_answer(tmp_path: Path) -> None:
    api = api_of(tmp_path, inference_pool("3"), PLAIN)
    async with api, following(of(api)) as it:
        await it.until("plain-0")
        api.scripts[POOLS].lists = [listed("8")]
        api.scripts[POOLS].send(event("DELETED", inference_pool("7")))
        with pytest.raises(SourceError, match="there is no InferencePool llama in the namespace inference"):
            await asyncio.wait_for(it.task, 20)
        assert len(it.reports) == 1


POOL = {"inference_pool": {"name": "llama"}}


@pytest.mark.parametrize(
    ("source", "issue"),
    [
        ({"dns": "vllm.example:8000"}, (("method",), "missing")),
        (POOL | {"method": "eagle3"}, (("speculative_config", "num_speculative_tokens"), "required by eagle3")),
        (POOL | {"dns": "vllm.example:8000", "method": "baseline"}, (("inference_pool",), "set together with dns")),
        ({"method": "baseline"}, ((), "has none of dns, srv, kubernetes and inference_pool")),
    ],
)
def test_only_an_inference_pool_needs_no_method(source: dict[str, Any], issue: tuple[tuple[str, ...], str]) -> None:
    with pytest.raises(ValidationError) as raised:
        DiscoverSettings.model_validate(source)
    assert [(each.path, each.message) for each in issues_of(raised.value, DiscoverSettings)] == [issue]


async def test_the_source_of_the_settings_asks_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = api_of(tmp_path, inference_pool("3"), BARE)
    found: list[Replica] = []
    async with api:
        monkeypatch.setattr(ApiServer, "of_cluster", lambda: ApiServer(api.url, api.account))
        source = discovery.source_of(DiscoverSettings.model_validate(POOL | {"method": "suffix"}))
        task = asyncio.create_task(source.follow(found.extend))
        await eventually(lambda: [each.own and each.own.method for each in found] == [Method.SUFFIX])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_source_is_another_one_with_another_method_for_pods_without_labels() -> None:
    bare, plain = DiscoverSettings.model_validate(POOL), DiscoverSettings.model_validate(POOL | {"method": "baseline"})
    assert bare.of_unlabelled == {}
    assert bare.where != plain.where
    assert plain.where == DiscoverSettings.model_validate(POOL | {"method": "baseline", "weight": 2}).where
