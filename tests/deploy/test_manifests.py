"""The manifests for Kubernetes without Helm: they fit each other, the chart and what the gateway knows of vLLM."""

from __future__ import annotations

import re
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml

from backends.speculation import serve_config
from tests.deploy.test_helm import NEWEST, OLDEST
from tests.support import gateway_api
from tests.support.deploy_tools import DEPLOY, options_of_gateway, vllm_options
from tests.support.helm_chart import container, of_kind, render, said_by

FOLDER = DEPLOY / "kubernetes"
VALUES = yaml.safe_load((FOLDER / "values.yaml").read_text())
MODEL, TARGET = "llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def test_the_picker_is_what_the_chart_makes(chart: helm.Chart) -> None:
    text = (FOLDER / "picker.yaml").read_text()
    (release, namespace) = re.findall(r"helm template (\S+) \S+ --namespace (\S+)", text)[0]
    rendered = chart.render(VALUES, name=release, namespace=namespace)
    manifests = [text for path, text in rendered.items() if path.endswith(".yaml")]
    made = [each for text in manifests for each in yaml.safe_load_all(text) if each]
    found = documents("picker.yaml")
    assert len(found) == len(made)
    assert [each for each in found if each not in made] == [], "make it again, with the command at its beginning"


def test_engines_are_members_that_say_how_they_speculate(chart: helm.Chart) -> None:
    pool = of_kind(render(chart, VALUES), "InferencePool")["llama"]["spec"]
    engines = documents("engines.yaml")
    assert {each["metadata"]["name"] for each in engines} == {"vllm-plain", "vllm-lookup", "vllm-head"}
    for engine in engines:
        for version in (OLDEST, NEWEST):
            kubernetes_validate.validate(engine, version, strict=True)
        template = engine["spec"]["template"]
        assert engine["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert pool["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert pool["targetPorts"] == [{"number": container(engine)["ports"][0]["containerPort"]}]
        said = said_by(template)

        words = [word for text in container(engine)["args"] for word in text.split("=", maxsplit=1)]
        argv = [*container(engine)["command"], *words]
        _, options = vllm_options(argv)
        (config,) = options.get("--speculative-config", [{}])
        known = serve_config(said.method, said.speculative_config)
        assert known.items() <= config.items(), "the labels contradict the arguments"
        assert known.get("num_speculative_tokens") == config.get("num_speculative_tokens")
        drafts = {key: value for key, value in config.items() if key != "method"}
        assert vllm_options(argv) == options_of_gateway(said.method, TARGET, [MODEL], drafts)
    assert list(VALUES["pool"]["models"]) == [MODEL]


@pytest.mark.parametrize("name", ["gateway.yaml", "picker.yaml"])
def test_the_gateway_api_knows_every_field(name: str) -> None:
    known = [each for each in documents(name) if (each["apiVersion"], each["kind"]) in gateway_api.SCHEMAS]
    assert known
    for each in known:
        gateway_api.validate(each)


def test_the_route_is_attached_to_the_gateway() -> None:
    (gateway,) = documents("gateway.yaml")
    (route,) = (each for each in documents("picker.yaml") if each["kind"] == "HTTPRoute")
    assert [parent["name"] for parent in route["spec"]["parentRefs"]] == [gateway["metadata"]["name"]]
    namespaces = {each["metadata"]["namespace"] for each in (gateway, *documents("engines.yaml"))}
    assert namespaces == {"inference"}
