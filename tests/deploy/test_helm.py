"""The Helm chart, linted and rendered by Helm itself, and its objects checked against the schemas of Kubernetes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

from backends.launch.process import REAPER_END_S
from backends.launch.supervisor import LaunchSpec
from backends.launch.vllm_command import vllm_serve_argv
from backends.speculation import Method
from gateway import __version__
from gateway.config.load import load_pool
from gateway.service.workers import _GRACE_S as WORKER_GRACE_S
from tests.support.deploy_tools import DEPLOY, ROOT, vllm_options
from tests.support.registered_metrics import sample_names

CHART = DEPLOY / "helm/speculation-gateway"
VALUES = Path(__file__).parent / "helm_values"
SETS = ("default", "replicas", "everything", "existing")
OLDEST, NEWEST = "1.30", "1.37"
OPERATOR = {"ServiceMonitor", "PrometheusRule"}
"""Kinds of the Prometheus operator, whose schemas no package has."""

Objects = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def chart() -> Iterator[helm.Chart]:
    with helm.Chart.load(CHART) as loaded:
        yield loaded


def values_of(name: str) -> dict[str, Any]:
    return {} if name == "default" else yaml.safe_load((VALUES / f"{name}.yaml").read_text())


def render(chart: helm.Chart, values: dict[str, Any]) -> Objects:
    """Return the objects by kind and name."""
    rendered = chart.render(values, name="pool", namespace="inference")
    manifests = [text for path, text in rendered.items() if path.endswith(".yaml")]
    documents = [found for text in manifests for found in yaml.safe_load_all(text) if found]
    objects = {
        (each["kind"], f"{each['metadata'].get('namespace', '')}/{each['metadata']['name']}"): each
        for each in documents
    }
    assert len(objects) == len(documents)
    return {(kind, name.removeprefix("/").removeprefix("inference/")): each for (kind, name), each in objects.items()}


def pod(deployment: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod(deployment)["containers"]
    return dict(only)


def of_kind(objects: Objects, kind: str) -> dict[str, dict[str, Any]]:
    return {name: each for (found, name), each in objects.items() if found == kind}


@pytest.mark.parametrize("name", SETS)
def test_helm_lints_it(name: str) -> None:
    report = helm.lint(CHART, values_of(name), strict=True, kube_version=f"v{OLDEST}.0")
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("name", SETS)
def test_kubernetes_knows_every_field(chart: helm.Chart, name: str) -> None:
    objects = render(chart, values_of(name))
    for (kind, _), each in objects.items():
        for version in (OLDEST, NEWEST):
            if kind not in OPERATOR:
                kubernetes_validate.validate(each, version, strict=True)
    assert chart.metadata["kubeVersion"] == f">={OLDEST}.0-0"
    assert chart.metadata["appVersion"] == __version__
    assert len(objects) >= (3 if name == "existing" else 7)


def test_a_value_set_turns_everything_on(chart: helm.Chart) -> None:
    """So that the checks of all objects are checks of the whole chart."""
    kinds = {kind for kind, _ in render(chart, values_of("everything"))}
    written = {
        kind
        for path in (CHART / "templates").glob("*.yaml")
        for kind in re.findall(r"(?m)^kind: (\w+)", path.read_text())
    }
    assert kinds == written
    unset = set(chart.values) - set(values_of("everything"))
    assert unset == {"existingConfigMap", "replicaCount", "resources", "podDisruptionBudget"}


@pytest.mark.parametrize("name", SETS[:3])
def test_the_gateway_accepts_the_pool_file(
    chart: helm.Chart, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_KEY", "k")
    monkeypatch.setenv("REDIS_URL", "redis://:secret@redis:6379/0")
    values = values_of(name)
    objects = render(chart, values)
    (config,) = [each for found, each in of_kind(objects, "ConfigMap").items() if found.endswith("-pool")]
    file = tmp_path / "pool.yaml"
    file.write_text(config["data"]["pool.yaml"])
    settings = load_pool(file)
    assert settings.server.watch
    assert settings.server.drain_s == values.get("drainSeconds", 60)
    discovered = {
        (model, source): found for model, each in settings.models.items() for source, found in each.discover.items()
    }
    wanted = chart.merge_values(values)
    assert {source for _, source in discovered} == set(values.get("replicas", {}))
    for (model, source), found in discovered.items():
        entry = wanted["replicaDefaults"] | values["replicas"][source]
        service = objects["Service", found.kubernetes.service]
        assert (model, found.method, found.weight) == (entry["model"], entry["method"], entry["weight"])
        assert found.kubernetes.port in {port["name"] for port in service["spec"]["ports"]}
    if name == "everything":
        assert settings.state.redis.get_secret_value() == "redis://:secret@redis:6379/0"
        assert settings.keys[0].tokens_per_minute == 2_000_000
        assert "outside" in settings.models["llama-3.1-8b"].backends


def test_without_values_the_pool_is_the_simulated_one(chart: helm.Chart) -> None:
    pool = yaml.safe_load(render(chart, {})["ConfigMap", "pool-speculation-gateway-pool"]["data"]["pool.yaml"])
    assert pool["models"] == yaml.safe_load((ROOT / "config/pool.yaml").read_text())["models"]


def test_an_existing_config_map_is_mounted_and_none_is_made(chart: helm.Chart) -> None:
    objects = render(chart, values_of("existing"))
    assert not of_kind(objects, "ConfigMap")
    assert not of_kind(objects, "Role")
    assert not of_kind(objects, "ServiceAccount")
    spec = pod(objects["Deployment", "pool-speculation-gateway"])
    assert spec["volumes"][0]["configMap"]["name"] == "our-pool"
    assert spec["serviceAccountName"] == "our-account"
    assert spec["automountServiceAccountToken"] is False


def test_replicas_are_started_as_the_gateway_starts_them(chart: helm.Chart) -> None:
    values = values_of("replicas")
    objects = render(chart, values)
    for name, own in values["replicas"].items():
        entry = values["replicaDefaults"] | own
        model = values["pool"]["models"][entry["model"]]
        expected = vllm_serve_argv(
            command=("vllm", "serve"),
            model=entry["target"],
            served_names=(entry["model"], *model.get("aliases", ())),
            host="0.0.0.0",
            port=8000,
            method=Method(entry.get("method", "baseline")),
            speculative_config=entry.get("speculativeConfig", {}),
            flags=entry.get("args", ()),
        )
        deployment = objects["Deployment", f"pool-speculation-gateway-{name}"]
        assert deployment["spec"]["replicas"] == entry.get("count", 1)
        found = container(deployment)
        assert vllm_options([*found["command"], *found["args"]]) == vllm_options(expected)
        assert found["resources"]["limits"] == {"nvidia.com/gpu": 1}


@pytest.mark.parametrize("name", SETS)
def test_selectors_select_the_pods_of_one_deployment(chart: helm.Chart, name: str) -> None:
    objects = render(chart, values_of(name))
    pods = {found: each["spec"]["template"] for found, each in of_kind(objects, "Deployment").items()}

    def selected(selector: dict[str, str]) -> list[str]:
        return [found for found, each in pods.items() if selector.items() <= each["metadata"]["labels"].items()]

    for found, deployment in of_kind(objects, "Deployment").items():
        assert selected(deployment["spec"]["selector"]["matchLabels"]) == [found]
    for found, service in of_kind(objects, "Service").items():
        assert selected(service["spec"]["selector"]) == [found]
        ports = {port["name"] for port in pods[found]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for found, each in of_kind(objects, kind).items():
            selector = each["spec"].get("selector") or each["spec"]["podSelector"]
            assert selected(selector["matchLabels"]) == [found]
    for each in of_kind(objects, "ServiceMonitor").values():
        labels = each["spec"]["selector"]["matchLabels"].items()
        (service,) = [
            each for each in of_kind(objects, "Service").values() if labels <= each["metadata"]["labels"].items()
        ]
        assert service["metadata"]["labels"][each["spec"]["jobLabel"]] == "gateway"  # the rules select this job
    for each in of_kind(objects, "HorizontalPodAutoscaler").values():
        assert ("Deployment", each["spec"]["scaleTargetRef"]["name"]) in objects


def test_network_policies_let_gateways_reach_replicas(chart: helm.Chart) -> None:
    objects = render(chart, values_of("everything"))
    policies = of_kind(objects, "NetworkPolicy")
    gateway, replica = policies["pool-speculation-gateway"]["spec"], policies["pool-speculation-gateway-head"]["spec"]
    labels = {
        name: each["spec"]["template"]["metadata"]["labels"] for name, each in of_kind(objects, "Deployment").items()
    }
    port = container(objects["Deployment", "pool-speculation-gateway-head"])["ports"][0]["containerPort"]
    (out,) = [rule for rule in gateway["egress"] if rule["ports"] == [{"port": port}]]
    assert out["to"][0]["podSelector"]["matchLabels"].items() <= labels["pool-speculation-gateway-head"].items()
    ours, theirs = replica["ingress"][0]["from"]
    assert ours["podSelector"]["matchLabels"].items() <= labels["pool-speculation-gateway"].items()
    assert theirs == values_of("everything")["replicaDefaults"]["from"][0]
    assert {6379, 443, 6443, 53} <= {port["port"] for rule in gateway["egress"] for port in rule["ports"]}


@pytest.mark.parametrize("name", SETS)
def test_containers_have_no_privileges(chart: helm.Chart, name: str) -> None:
    for deployment in of_kind(render(chart, values_of(name)), "Deployment").values():
        security, spec = container(deployment)["securityContext"], pod(deployment)["securityContext"]
        assert security == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert spec["runAsNonRoot"] is True
        assert spec["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container(deployment).keys()
        mounted = {mount["name"] for mount in container(deployment)["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod(deployment)["volumes"]}


def test_the_gateway_runs_as_in_the_image(chart: helm.Chart) -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    deployment = render(chart, {})["Deployment", "pool-speculation-gateway"]
    (command,) = re.findall(r"(?m)^CMD (.+)$", dockerfile)
    (user,) = re.findall(r"(?m)^USER (\d+):\d+$", dockerfile)
    (state,) = re.findall(r"STATE_DIRECTORY=(\S+)", dockerfile)
    assert container(deployment)["args"] == json.loads(command)
    assert pod(deployment)["securityContext"]["runAsUser"] == int(user)
    assert {mount["mountPath"] for mount in container(deployment)["volumeMounts"]} == {"/etc/gateway", state, "/tmp"}


@pytest.mark.parametrize("name", ["default", "everything"])
def test_kubernetes_waits_for_draining(chart: helm.Chart, name: str) -> None:
    spec = pod(render(chart, values_of(name))["Deployment", "pool-speculation-gateway"])
    values = chart.merge_values(values_of(name))
    launched_s = LaunchSpec("", (), (), {}, Path()).shutdown_timeout_s + REAPER_END_S
    needed_s = values["preStopSeconds"] + values["drainSeconds"] + WORKER_GRACE_S + launched_s
    assert spec["terminationGracePeriodSeconds"] >= needed_s


def test_the_account_may_only_see_endpoint_slices(chart: helm.Chart) -> None:
    objects = render(chart, values_of("everything"))
    names = {"pool-speculation-gateway-discovery", "engines/pool-speculation-gateway-discovery"}
    roles, bindings = of_kind(objects, "Role"), of_kind(objects, "RoleBinding")
    assert set(roles) == set(bindings) == names
    allowed = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    account = {"kind": "ServiceAccount", "name": "gateways", "namespace": "inference"}
    assert all(role["rules"] == [allowed] for role in roles.values())
    assert all(binding["subjects"] == [account] for binding in bindings.values())


def test_rules_and_dashboards_are_those_of_deploy(chart: helm.Chart, tmp_path: Path) -> None:
    """In the packaged chart too, which has no links."""
    with helm.Chart.load(chart.save(tmp_path)) as packaged:
        objects = render(packaged, values_of("everything"))
    assert objects == render(chart, values_of("everything"))
    rules = objects["PrometheusRule", "pool-speculation-gateway"]["spec"]
    assert rules == yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text())
    dashboards = objects["ConfigMap", "pool-speculation-gateway-dashboards"]["data"]
    assert dashboards == {path.name: path.read_text() for path in (DEPLOY / "grafana/dashboards").glob("*.json")}
    assert dashboards


def test_it_scales_by_a_metric_that_exists(chart: helm.Chart) -> None:
    (scaler,) = of_kind(render(chart, values_of("everything")), "HorizontalPodAutoscaler").values()
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in sample_names()
    assert "replicas" not in render(chart, values_of("everything"))["Deployment", "pool-speculation-gateway"]["spec"]
    (adapter,) = re.findall(r"```yaml\n( +rules:.+?)```", (DEPLOY / "README.md").read_text(), re.DOTALL)
    (rule,) = yaml.safe_load(adapter)["rules"]
    assert metric["pods"]["metric"]["name"] in rule["seriesQuery"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"replicaCont": 3}, "replicaCont"),
        ({"redis": {"url": "redis://:password@redis:6379"}}, "url"),
        ({"replicas": {"Head": {}}}, "Head"),
        ({"replicas": {"head": {"method": "eagle4"}}}, "method"),
        ({"replicas": {"head": {"model": "m"}}}, "replicas.head.target: required; set it there or in replicaDefaults"),
    ],
)
def test_wrong_values_are_refused(chart: helm.Chart, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(message)):
        chart.render(wrong, name="pool", namespace="inference")
