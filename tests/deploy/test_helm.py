"""The Helm chart, linted by Helm, and its objects checked against the schemas of Kubernetes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

from backends.launch.supervisor import GROUP_END_S, LaunchSpec
from gateway import __version__
from gateway.service.workers import _GRACE_S as WORKER_GRACE_S
from tests.support import gateway_api
from tests.support.deploy_tools import DEPLOY
from tests.support.helm_chart import CHART, SETS, container, of_kind, pod, render, values_of
from tests.support.registered_metrics import sample_names

pytestmark = pytest.mark.slow

OLDEST, NEWEST = "1.30", "1.37"
HEAD = {"head": {"model": "m", "target": "t"}}
NO_ROUTE = {"httpRoute": {"create": False}}
OPERATOR = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}
"""Kinds of the Prometheus operator and of KEDA, whose schemas no package has."""


def _pool(**model: Any) -> dict[str, Any]:
    return {"models": {"m": {"policy": {"name": "learned"}, **model}}}


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
            if kind not in OPERATOR and (each["apiVersion"], kind) not in gateway_api.SCHEMAS:
                kubernetes_validate.validate(each, version, strict=True)
        if (each["apiVersion"], kind) in gateway_api.SCHEMAS:
            gateway_api.validate(each)
    assert chart.metadata["kubeVersion"] == f">={OLDEST}.0-0"
    assert chart.metadata["appVersion"] == __version__
    assert len(objects) >= (3 if name == "existing" else 7)


def test_a_replica_may_be_called_by_a_number(chart: helm.Chart) -> None:
    values = {"replicas": {"7": HEAD["head"]}, "networkPolicy": {"enabled": True}}
    for manifest in render(chart, values).values():
        kubernetes_validate.validate(manifest, NEWEST, strict=True)


def test_keda_sets_the_number_of_each_replica_by_its_method(chart: helm.Chart) -> None:
    values = values_of("everything")
    objects = render(chart, values | {"fleet": values["fleet"] | {"minReplicas": 0}})
    (scaled,) = of_kind(objects, "ScaledObject").values()
    assert scaled["spec"]["minReplicaCount"] == 0  # a method may go
    deployment = objects["Deployment", scaled["spec"]["scaleTargetRef"]["name"]]
    assert "replicas" not in deployment["spec"]  # an upgrade of the release does not set it back
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["query"] == 'max(gateway_replicas_needed{model="llama-3.1-8b",method="eagle3"})'


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


@pytest.mark.parametrize("name", SETS)
def test_selectors_select_the_pods_of_one_deployment(chart: helm.Chart, name: str) -> None:
    objects = render(chart, values_of(name))
    pods = {found: each["spec"]["template"] for found, each in of_kind(objects, "Deployment").items()}

    def selected(selector: dict[str, str]) -> list[str]:
        return [found for found, each in pods.items() if selector.items() <= each["metadata"]["labels"].items()]

    for found, deployment in of_kind(objects, "Deployment").items():
        assert selected(deployment["spec"]["selector"]["matchLabels"]) == [found]
    for found, service in of_kind(objects, "Service").items():
        owner = found.removesuffix("-picker")
        assert selected(service["spec"]["selector"]) == [owner]
        ports = {port["name"] for port in pods[owner]["spec"]["containers"][0]["ports"]}
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
    (out,) = [rule for rule in gateway["egress"] if rule["ports"] == [{"port": port}] and "podSelector" in str(rule)]
    assert out["to"][0]["podSelector"]["matchLabels"].items() <= labels["pool-speculation-gateway-head"].items()
    ours, theirs, proxies = replica["ingress"][0]["from"]
    assert ours["podSelector"]["matchLabels"].items() <= labels["pool-speculation-gateway"].items()
    assert theirs == values_of("everything")["replicaDefaults"]["from"][0]
    assert [proxies] == values_of("everything")["networkPolicy"]["from"], "with a picker, proxies reach replicas too"
    ports = [{"port": port["name"]} for port in container(objects["Deployment", "pool-speculation-gateway"])["ports"]]
    assert gateway["ingress"] == [{"ports": ports, "from": [proxies]}]
    assert {6379, 443, 6443, 53} <= {port["port"] for rule in gateway["egress"] for port in rule["ports"]}


@pytest.mark.parametrize(
    ("backend", "rule"),
    [
        ("http://10.0.0.1:8000", {"ports": [{"port": 8000}], "to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]}),
        ("https://[fd00::1]", {"ports": [{"port": 443}], "to": [{"ipBlock": {"cidr": "fd00::1/128"}}]}),
        ("http://engines.example/v", {"ports": [{"port": 80}]}),
    ],
)
def test_network_policies_let_gateways_reach_the_engines_of_the_pool(
    chart: helm.Chart, backend: str, rule: dict[str, Any]
) -> None:
    values = {"networkPolicy": {"enabled": True}, "pool": _pool(backends={"a": {"method": "baseline", "url": backend}})}
    (policy,) = of_kind(render(chart, values), "NetworkPolicy").values()
    assert rule in policy["spec"]["egress"]


def test_engines_that_a_policy_would_cut_off_are_named(chart: helm.Chart) -> None:
    pool = _pool(backends={"a": {"method": "baseline", "url": "http://${HOST}:8000"}})
    values = {"networkPolicy": {"enabled": True}, "pool": pool}
    with pytest.raises(helm.HelmError, match=re.escape("keeps the gateways from pool.models.m.backends.a")):
        render(chart, values)
    values["networkPolicy"] = {"enabled": True, "egress": [{"ports": [{"port": 8000}]}]}
    assert render(chart, values)


def test_a_wrong_key_of_the_pool_is_refused() -> None:
    pool = _pool(backends={"a": {"method": "baseline", "urll": "http://a"}})
    report = helm.lint(CHART, {"pool": pool}, strict=True, kube_version=f"v{OLDEST}.0")
    assert "urll" in " ".join(report["errors"])


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


@pytest.mark.parametrize("name", ["picker", "everything"])
def test_a_picker_is_where_the_inference_pool_says(chart: helm.Chart, name: str) -> None:
    objects = render(chart, values_of(name))
    (deployment,) = (each for found, each in of_kind(objects, "Deployment").items() if found.endswith("-gateway"))
    arguments, ports = container(deployment)["args"], container(deployment)["ports"]
    ((pool_name, pool),) = of_kind(objects, "InferencePool").items()
    picker = pool["spec"]["endpointPickerRef"]
    (port,) = objects["Service", picker["name"]]["spec"]["ports"]
    assert port["port"] == picker["port"]["number"]
    assert {"name": port["targetPort"], "containerPort": port["port"]} in ports  # headless: that of the pods
    assert arguments[0] == "picker"
    assert arguments[arguments.index("--listen") + 1] == f"0.0.0.0:{port['port']}"
    (route,) = of_kind(objects, "HTTPRoute").values()
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool_name

    probes = [container(deployment)[f"{each}Probe"] for each in ("startup", "liveness", "readiness")]
    if name == "picker":
        assert port["appProtocol"] == "kubernetes.io/h2c"
        assert [each["grpc"]["service"] for each in probes] == ["liveness", "liveness", "readiness"]
    else:  # kubelets cannot ask by gRPC over TLS
        assert port["appProtocol"] == "http2"
        assert [each["httpGet"]["path"] for each in probes] == ["/health", "/health", "/readyz"]


@pytest.mark.parametrize("name", ["default", "everything"])
def test_kubernetes_waits_for_draining(chart: helm.Chart, name: str) -> None:
    spec = pod(render(chart, values_of(name))["Deployment", "pool-speculation-gateway"])
    values = chart.merge_values(values_of(name))
    launched_s = LaunchSpec("", (), (), {}, Path()).shutdown_timeout_s + GROUP_END_S
    needed_s = values["preStopSeconds"] + values["drainSeconds"] + WORKER_GRACE_S + launched_s
    assert spec["terminationGracePeriodSeconds"] >= needed_s


def test_the_account_may_only_see_where_replicas_are(chart: helm.Chart) -> None:
    objects = render(chart, values_of("everything"))
    names = {"pool-speculation-gateway-discovery", "engines/pool-speculation-gateway-discovery"}
    roles, bindings = of_kind(objects, "Role"), of_kind(objects, "RoleBinding")
    assert set(roles) == set(bindings) == names
    slices, pools, pods = (
        {"apiGroups": [group], "resources": [resource], "verbs": ["list", "watch"]}
        for group, resource in (
            ("discovery.k8s.io", "endpointslices"),
            ("inference.networking.k8s.io", "inferencepools"),
            ("", "pods"),
        )
    )
    account = {"kind": "ServiceAccount", "name": "gateways", "namespace": "inference"}
    assert all(role["rules"] == [slices, pools, pods] for role in roles.values())
    (without,) = of_kind(render(chart, {}), "Role").values()
    assert without["rules"] == [slices], "without a picker"
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
        ({"picker": {"enabled": True, **NO_ROUTE}}, "picker.model: required; an InferencePool serves one model"),
        ({"picker": {"enabled": True, "model": "m"}}, "picker.httpRoute.parentRefs: required; name your Gateway"),
        (
            {
                "picker": {"enabled": True, "model": "m", **NO_ROUTE},
                "replicas": {"head": {"model": "n", "target": "t"}},
            },
            "replicas: one serves n, but all pods of the InferencePool serve m",
        ),
        ({"picker": {"inferencePool": {"failureMode": "Open"}}}, "failureMode"),
        *(
            (
                {"fleet": {"enabled": True}, "replicas": HEAD, "pool": pool},
                "set pool.models.m.policy to {name: learned, slo",
            )
            for pool in ({}, {"models": {"m": {"policy": {"name": "learned", "slo": {}}}}})
        ),
    ],
)
def test_wrong_values_are_refused(chart: helm.Chart, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(message)):
        chart.render(wrong, name="pool", namespace="inference")
