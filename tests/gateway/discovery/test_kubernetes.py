"""Replicas from EndpointSlices, with a recorded API server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.discovery import api_server
from gateway.discovery.api_server import ApiServer
from gateway.discovery.kubernetes import KubernetesSource
from gateway.discovery.source import SourceError
from tests.gateway.discovery.followed import Followed, following
from tests.support.kubernetes_api import (
    SLICES,
    End,
    KubernetesApi,
    Script,
    bookmark,
    endpoint,
    endpoint_slice,
    event,
    expired,
    listed,
)
from tests.support.waiting import eventually, stays

A, B, C = endpoint("10.0.0.1", "vllm-a"), endpoint("10.0.0.2", "vllm-b"), endpoint("10.0.0.3", "vllm-c")


def of(api: KubernetesApi, port: str | int = "http") -> KubernetesSource:
    return KubernetesSource("vllm", None, port, ApiServer(api.url, api.account))


def api_of(tmp_path: Path, *lists: dict[str, Any] | int) -> KubernetesApi:
    return KubernetesApi(tmp_path / "account", {SLICES: Script(list(lists))})


def slices(api: KubernetesApi) -> Script:
    return api.scripts[SLICES]


@pytest.mark.parametrize("port", ["http", 8000])
async def test_ready_endpoints_are_replicas_with_the_names_of_their_pods(tmp_path: Path, port: str | int) -> None:
    later, going = endpoint("10.0.0.8", "later", ready=False), endpoint("10.0.0.9", "going", terminating=True)
    unknown = endpoint("10.0.0.4", "unknown", ready=None)  # the reference: to be read as ready
    first, second = endpoint_slice("s1", "3", A, later, going), endpoint_slice("s2", "4", B, unknown)
    async with (
        api_of(tmp_path, listed("5", first, more="next"), listed("5", second)) as api,
        following(of(api, port)) as it,
    ):
        await it.until("vllm-a", "vllm-b", "unknown")
        assert it.reports[0]["vllm-a"].url == "http://10.0.0.1:8000"
        assert [query.get("continue") for query in slices(api).asked[:2]] == [None, "next"]
        assert {query["labelSelector"] for query in slices(api).asked} == {"kubernetes.io/service-name=vllm"}


async def test_what_is_not_as_expected_is_left_out_alone(tmp_path: Path) -> None:
    odd = [{"addresses": []}, {"conditions": {"ready": True}}, endpoint("not an address", "x"), A, 7]
    broken = endpoint_slice("s2", "4") | {"endpoints": 5}
    whole = endpoint_slice("s1", "3", *odd)  # type: ignore[arg-type]
    async with api_of(tmp_path, listed("5", broken, whole)) as api, following(of(api)) as it:
        await it.until("vllm-a")
        slices(api).send(event("ADDED", endpoint_slice("s3", "6", B) | {"ports": 5}))
        slices(api).send(event("ADDED", endpoint_slice("s4", "7", C)))
        await it.until("vllm-a", "vllm-c")


async def test_a_silent_watch_asks_whether_its_server_is_still_there(tmp_path: Path) -> None:
    """In Linux's table of connections, timer 2 is that of keep-alive."""
    async with api_of(tmp_path, listed("5", endpoint_slice("s1", "3", A))) as api, following(of(api)) as it:
        await it.until("vllm-a")
        await eventually(lambda: slices(api).watches == ["5"])
        assert timers(int(api.url.rpartition(":")[2])) == {"02"}


def timers(port: int) -> set[str]:
    """Return the timers of the open connections to a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return {row[5][:2] for row in rows if row[2].endswith(f":{port:04X}") and row[3] == "01"}


@pytest.mark.slow
async def test_events_change_the_replicas_and_a_watch_goes_on_where_it_was(tmp_path: Path) -> None:
    async with api_of(tmp_path, listed("5", endpoint_slice("s1", "3", A))) as api, following(of(api)) as it:
        await it.until("vllm-a")
        slices(api).send(event("MODIFIED", endpoint_slice("s1", "6", A, B)))
        await it.until("vllm-a", "vllm-b")
        slices(api).send(event("ADDED", endpoint_slice("s2", "7", C)))
        await it.until("vllm-a", "vllm-b", "vllm-c")
        slices(api).send(
            event("MODIFIED", endpoint_slice("s1", "8", A, endpoint("10.0.0.2", "vllm-b", terminating=True)))
        )
        await it.until("vllm-a", "vllm-c")
        slices(api).send(event("DELETED", endpoint_slice("s1", "9", A)))
        await it.until("vllm-c")
        count = len(it.reports)
        slices(api).send(bookmark("20"), End)
        await eventually(lambda: slices(api).watches == ["5", "20"])
        slices(api).send(event("MODIFIED", endpoint_slice("s2", "21")))
        await it.until()
        assert len(it.reports) == count + 1, "a bookmark changes nothing"


@pytest.mark.slow
@pytest.mark.parametrize("in_watch", [True, False])
async def test_a_version_that_has_expired_is_listed_again(tmp_path: Path, in_watch: bool) -> None:
    lists: list[Any] = [listed("5", endpoint_slice("s1", "3", A)), *([] if in_watch else [410])]
    async with api_of(tmp_path, *lists, listed("900", endpoint_slice("s1", "800", B))) as api, following(of(api)) as it:
        await it.until("vllm-a")
        slices(api).send(expired())
        await it.until("vllm-b")
        await eventually(lambda: slices(api).watches == ["5", "900"])


@pytest.mark.slow
async def test_a_token_that_has_been_replaced_is_read_again(tmp_path: Path) -> None:
    async with api_of(tmp_path, listed("5", endpoint_slice("s1", "3", A))) as api, following(of(api)) as it:
        await it.until("vllm-a")
        await eventually(lambda: len(slices(api).watches) == 1)
        api.token = "token-2"
        (api.account / "token").write_text("token-2")
        slices(api).send(End)
        await eventually(lambda: len(slices(api).watches) == 2)
        slices(api).send(event("MODIFIED", endpoint_slice("s1", "6", B)))
        await it.until("vllm-b")


@pytest.mark.slow
async def test_watches_that_end_at_once_are_not_begun_again_at_once(tmp_path: Path) -> None:
    async with api_of(tmp_path, listed("5", endpoint_slice("s1", "3", A))) as api, following(of(api)) as it:
        await it.until("vllm-a")
        slices(api).send(*[End] * 1000)
        await stays(lambda: len(slices(api).watches) <= 3, 1.5)
        await eventually(lambda: len(slices(api).watches) >= 3)


async def test_what_goes_wrong_is_told_without_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def problem(api: KubernetesApi) -> str:
        followed = Followed(of(api))
        with pytest.raises(SourceError) as raised:
            await asyncio.wait_for(followed.task, 20)
        assert api.token not in str(raised.value)
        return str(raised.value)

    async with api_of(tmp_path, 403) as api:
        assert "needs `list` and `watch`" in await problem(api)
        slices(api).lists = [500]
        assert "answered 500" in await problem(api)
        slices(api).lists = [{"kind": "Other"}]
        assert "not as expected" in await problem(api)
        slices(api).lists = [listed("5", endpoint_slice("s1", "3", A))]
        slices(api).send(b'{"type": "MODIF')  # cut
        assert "Error" in await problem(api)
        monkeypatch.setattr(api_server, "_MOST_BYTES", 100)
        assert "more than 100 bytes" in await problem(api)
        (api.account / "token").unlink()
        assert "service account" in await problem(api)


async def test_outside_a_cluster_that_is_said() -> None:
    with pytest.raises(SourceError, match="does not run in a cluster"):
        ApiServer.of_cluster({})
    assert ApiServer.of_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1"}).url == "https://[fd00::1]:443"
