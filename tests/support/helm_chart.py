"""The Helm chart with sets of values, rendered by Helm itself."""

from __future__ import annotations

from typing import Any

import helm_python as helm
import yaml

from gateway.discovery.inference_pool import Pod
from tests.support.deploy_tools import DEPLOY
from tests.support.paths import ROOT

CHART = DEPLOY / "helm/speculation-gateway"
VALUES = ROOT / "tests/deploy/helm_values"
SETS = ("default", "replicas", "everything", "picker", "existing")

Objects = dict[tuple[str, str], dict[str, Any]]


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


def said_by(template: dict[str, Any]) -> Any:
    """Return how a pod of a template says that its engine speculates."""
    status = {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    return Pod.of({"status": status, **template}, {}).own


def of_kind(objects: Objects, kind: str) -> dict[str, dict[str, Any]]:
    return {name: each for (found, name), each in objects.items() if found == kind}
