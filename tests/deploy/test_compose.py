"""compose.yaml follows the Compose specification and matches the image."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from gateway.config.load import load_pool
from tests.support.deploy_tools import DEPLOY, ROOT, run

COMPOSE = DEPLOY / "compose.yaml"


@pytest.fixture
def services() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    return services


def test_it_follows_the_compose_specification() -> None:
    assert "ok" in run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)


def test_built_and_mounted_files_exist(services: dict[str, Any]) -> None:
    build = services["gateway"]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context == ROOT
    assert (context / build["dockerfile"]).is_file()
    pool, state = services["gateway"]["volumes"]
    (state_folder,) = re.findall(r"STATE_DIRECTORY=(\S+)", (DEPLOY / "Dockerfile").read_text())
    assert state == f"state:{state_folder}"
    default = re.fullmatch(r"\$\{POOL_FILE:-(.+)\}", pool["source"])
    assert default
    assert (DEPLOY / default[1]).is_file()
    for volume in services["prometheus"]["volumes"][:2]:
        assert (DEPLOY / volume.split(":")[0]).is_file(), volume


def test_prometheus_scrapes_the_port_of_the_image(services: dict[str, Any]) -> None:
    (exposed,) = re.findall(r"^EXPOSE (\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    jobs = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    assert targets["gateway"] == [f"gateway:{exposed}"]
    assert services["gateway"]["ports"] == ["${GATEWAY_ADDRESS:-127.0.0.1}:${GATEWAY_PORT:-8080}:" + exposed]


def test_ports_are_published_on_localhost_by_default(services: dict[str, Any]) -> None:
    for service in services.values():
        for port in service.get("ports", []):
            assert port.startswith(("127.0.0.1:", "${GATEWAY_ADDRESS:-127.0.0.1}:"))


def test_services_have_no_privileges_and_the_gateway_is_read_only(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    assert services["gateway"]["read_only"] is True


def test_the_grace_period_is_longer_than_draining(services: dict[str, Any]) -> None:
    longest_s = max(load_pool(path).server.drain_s for path in (ROOT / "config").glob("pool*.yaml"))
    assert float(services["gateway"]["stop_grace_period"].removesuffix("s")) > longest_s


def test_redis_is_optional_and_does_not_evict(services: dict[str, Any]) -> None:
    assert services["redis"]["profiles"] == ["state"]
    command = services["redis"]["command"]
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert not any("redis" in str(service.get("depends_on", "")) for service in services.values())
