"""The pool file that the Helm chart writes, and the replicas that it starts."""

from __future__ import annotations

from pathlib import Path

import helm_python as helm
import pytest
import yaml

from backends.speculation import Method, serve_config
from gateway.config.load import load_pool
from tests.support.deploy_tools import options_of_gateway, vllm_options
from tests.support.helm_chart import SETS, container, of_kind, pod, render, said_by, values_of
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", SETS[:4])
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
    if wanted["picker"]["enabled"]:
        (((model, _), found),) = discovered.items()
        assert model == "llama-3.1-8b"
        assert ("InferencePool", found.inference_pool.name) in objects
        discovered = {}
    else:
        assert {source for _, source in discovered} == set(values.get("replicas", {}))
    for (model, source), found in discovered.items():
        entry = wanted["replicaDefaults"] | values["replicas"][source]
        service = objects["Service", found.kubernetes.service]
        assert (model, found.method, found.weight) == (entry["model"], entry["method"], entry["weight"])
        assert (found.drafter_limit and found.drafter_limit.tokens) == entry.get("drafterLimit")
        assert settings.models[model].rescue, "others go on with the streams of a replica that is taken away"
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
        names, method = [entry["model"], *model.get("aliases", ())], Method(entry.get("method", "baseline"))
        drafts, flags = entry.get("speculativeConfig", {}), entry.get("args", ())
        expected = options_of_gateway(method, entry["target"], names, drafts, flags)
        deployment = objects["Deployment", f"pool-speculation-gateway-{name}"]
        assert deployment["spec"]["replicas"] == entry.get("count", 1)
        found = container(deployment)
        assert vllm_options([*found["command"], *found["args"]]) == expected
        assert found["resources"]["limits"] == {"nvidia.com/gpu": 1}


def test_pods_of_replicas_tell_a_picker_how_they_speculate(chart: helm.Chart) -> None:
    values = values_of("replicas")
    del values["replicas"]["qwen"]
    picker = {"enabled": True, "httpRoute": {"parentRefs": [{"name": "inference-gateway"}]}}
    objects = render(chart, values | {"picker": picker})
    for name, own in values["replicas"].items():
        template = objects["Deployment", f"pool-speculation-gateway-{name}"]["spec"]["template"]
        pool = objects["InferencePool", "pool-speculation-gateway"]["spec"]
        assert pool["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert pool["targetPorts"] == [
            {"number": container({"spec": {"template": template}})["ports"][0]["containerPort"]}
        ]
        found = said_by(template)
        assert (found.method, found.weight) == (own.get("method", "baseline"), own.get("weight", 1))
        assert serve_config(found.method, found.speculative_config) == (
            {"method": own["method"], **own["speculativeConfig"]} if "method" in own else {}
        )
    unlabelled = render(chart, values)["Deployment", "pool-speculation-gateway-head"]["spec"]["template"]["metadata"]
    assert not [key for key in {**unlabelled["labels"], **unlabelled.get("annotations", {})} if "speculation." in key]


def test_the_schema_of_values_knows_every_method(chart: helm.Chart) -> None:
    schema = chart.schema
    assert schema
    assert schema["$defs"]["replica"]["properties"]["method"]["enum"] == list(Method)
