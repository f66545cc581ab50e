"""compose.yaml follows the Compose specification and matches the image."""

from __future__ import annotations

import itertools
import re
import shlex
from typing import Any

import pytest
import yaml

from backends.calibration.load import load_calibration
from backends.speculation import Method
from gateway.config.load import load_pool
from lab.plan.memory import fit
from lab.plan.mixes import DRAFTS
from tests.support.deploy_tools import DEPLOY, options_of_gateway, run, vllm_options
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

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
    mounted = [volume.split(":")[0] for name in ("prometheus", "grafana") for volume in services[name]["volumes"]]
    assert all((DEPLOY / path).exists() for path in mounted if path.startswith("./"))


def test_images_are_pinned_and_services_are_watched(services: dict[str, Any]) -> None:
    for name, service in services.items():
        if name == "gateway":
            assert "\nHEALTHCHECK " in (DEPLOY / "Dockerfile").read_text()
        else:
            assert re.fullmatch(r"[a-z/-]+:v?\d+(\.\d+)+(-alpine)?", service["image"])
            assert service["healthcheck"]["test"][0] == "CMD"


def test_no_secret_has_a_value(services: dict[str, Any]) -> None:
    for service in services.values():
        for name, value in service.get("environment", {}).items():
            if re.search("KEY|TOKEN|PASSWORD|SECRET", name):
                assert value == f"${{{name}:-}}"


def test_prometheus_scrapes_the_port_of_the_image(services: dict[str, Any]) -> None:
    (exposed,) = re.findall(r"^EXPOSE (\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    jobs = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    assert targets["gateway"] == [f"gateway:{exposed}"]
    assert services["gateway"]["ports"] == ["${GATEWAY_ADDRESS:-127.0.0.1}:${GATEWAY_PORT:-8080}:" + exposed]


def test_grafana_finds_its_dashboards_and_prometheus(services: dict[str, Any]) -> None:
    provisioning = DEPLOY / "grafana/provisioning"
    (source,) = (provisioning / "datasources").iterdir()
    (provider,) = (provisioning / "dashboards").iterdir()
    (datasource,) = yaml.safe_load(source.read_text())["datasources"]
    (dashboards,) = yaml.safe_load(provider.read_text())["providers"]
    port = services["prometheus"]["ports"][0].rpartition(":")[2]
    assert datasource["url"] == f"http://prometheus:{port}"
    assert f"./grafana/dashboards:{dashboards['options']['path']}:ro" in services["grafana"]["volumes"]


def test_services_are_on_localhost_without_privileges_and_with_read_only_roots(services: dict[str, Any]) -> None:
    for name, service in services.items():
        for port in service.get("ports", []):
            assert port.startswith(("127.0.0.1:", "${GATEWAY_ADDRESS:-127.0.0.1}:"))
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service.get("read_only") is (None if name.startswith("vllm-") else True)


def test_the_grace_period_is_longer_than_draining(services: dict[str, Any]) -> None:
    longest_s = max(load_pool(path).server.drain_s for path in (ROOT / "config").glob("pool*.yaml"))
    assert float(services["gateway"]["stop_grace_period"].removesuffix("s")) > longest_s


def test_redis_does_not_evict_and_nothing_waits_for_it(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = services["redis"]["command"]
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert not any("redis" in str(service.get("depends_on", "")) for service in services.values())
    default = re.fullmatch(r"\$\{REDIS_URL:-(.+)\}", services["gateway"]["environment"]["REDIS_URL"])
    assert default
    monkeypatch.setenv("REDIS_URL", default[1])
    for pool in ("pool.yaml", "pool.gpu.yaml"):
        assert load_pool(ROOT / "config" / pool).state.redis.get_secret_value() == default[1]


def test_replicas_on_one_gpu_are_those_of_the_pool_file(services: dict[str, Any]) -> None:
    variables = dict(line.split("=") for line in (DEPLOY / "gpu.env").read_text().splitlines() if "#" not in line)
    assert variables["COMPOSE_PROFILES"] == "gpu"
    ((name, model),) = load_pool(DEPLOY / variables["POOL_FILE"]).models.items()
    started = {found: service for found, service in services.items() if service.get("profiles") == ["gpu"]}
    assert {f"http://{found}:8000" for found in started} == {str(each.url) for each in model.backends.values()}
    for each in model.backends.values():
        service = started[each.url.split("//")[1].split(":")[0]]
        words, options = vllm_options([*service["entrypoint"], *shlex.split(service["command"])])
        (config,) = options.get("--speculative-config", [{}])
        drafts = {key: value for key, value in config.items() if key != "method"}
        flags = ("--gpu-memory-utilization", "0.31", "--max-model-len", "16384")
        assert (words, options) == options_of_gateway(each.method, words[2], [name, *model.aliases], drafts, flags)
        stated = each.speculative_config.model_dump(exclude_unset=True) if each.speculative_config else {}
        assert stated.items() <= config.items()


def test_they_fit_on_it_together(services: dict[str, Any]) -> None:
    calibration, share = load_calibration("qwen3-8b-h100"), 0.0
    for name, service in services.items():
        if name.startswith("vllm-"):
            words, options = vllm_options([*service["entrypoint"], *shlex.split(service["command"])])
            (config,) = options.get("--speculative-config", [{}])
            (utilization,), (longest,) = options["--gpu-memory-utilization"], options["--max-model-len"]
            assert words[2] == calibration.target
            method = Method(config.get("method", "baseline"))
            if "model" in config:
                assert config["model"] == DRAFTS[calibration.target][method]
            memory = calibration.memory.model_copy(update={"utilization": float(utilization)})
            found = fit(calibration.model_copy(update={"memory": memory}), method)
            assert found.tokens > 2 * int(longest), (name, found)
            share += float(utilization)
    assert 0.9 < share <= 0.95
    for earlier, later in itertools.pairwise(name for name in services if name.startswith("vllm-")):
        one_after_the_other = {earlier: {"condition": "service_healthy"}}  # vLLM measures the free memory at its start
        assert services[later]["depends_on"] == one_after_the_other
