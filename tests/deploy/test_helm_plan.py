"""Values of the Helm chart that `gateway plan` writes, checked by the chart's schema and rendered."""

from __future__ import annotations

import json
from dataclasses import replace

import helm_python as helm
import pytest
import yaml

from backends.calibration.load import load_calibration
from backends.speculation import Method
from lab.plan.mixes import kinds
from lab.plan.output import helm_values, pool_file
from lab.plan.planning import Planned
from lab.plan.result import Plan
from tests.support.helm_chart import CHART, container, of_kind, render

pytestmark = pytest.mark.slow

SCHEDULE = ((1, 28, 5), (29, 1024, 2))


def _planned(calibration_name: str) -> Planned:
    calibration = load_calibration(calibration_name)
    methods = [(Method.SUFFIX, (24,)), (Method.EAGLE3, (5,)), (Method.DRAFT_MODEL, (5,))]
    known = [replace(kind, schedule=SCHEDULE) if kind.draft else kind for kind in kinds(calibration, 4096, methods)]
    chosen = (0, *((1,) * 2), *((2,) if len(known) > 2 else ()))
    plan = Plan(tuple(known), chosen, (), (0,) * len(chosen), chosen, None, 1)
    return Planned(calibration, 4096, plan, tuple(known), "llama", {"name": "learned"})


@pytest.mark.parametrize(("name", "gpus"), [("llama-3.1-8b-h100", 1), ("llama-3.1-70b-4xh100", 4)])
def test_the_chart_takes_the_values_of_a_plan(chart: helm.Chart, name: str, gpus: int) -> None:
    planned = _planned(name)
    values = yaml.safe_load(helm_values(planned, ""))
    report = helm.lint(CHART, values, strict=True)
    assert report["errors"] == []

    objects = render(chart, values)
    prefix, drafting = "pool-speculation-gateway-", planned.kinds[1]
    found = of_kind(objects, "Deployment")
    replicas = {name.removeprefix(prefix): each for name, each in found.items() if name.startswith(prefix)}
    counts = {name: each["spec"]["replicas"] for name, each in replicas.items()}
    assert (counts["suffix"], counts[drafting.name]) == (1, 2)
    assert sum(counts.values()) == len(planned.replicas)
    head = container(replicas[drafting.name])
    arguments = head["args"]
    config = json.loads(arguments[arguments.index("--speculative-config") + 1])
    assert config["method"] == drafting.method
    assert config["num_speculative_tokens_per_batch_size"] == [list(each) for each in SCHEDULE]
    assert arguments[arguments.index("--served-model-name") + 1] == "llama"
    assert head["resources"]["limits"]["nvidia.com/gpu"] == gpus
    assert ("--tensor-parallel-size" in arguments) == (gpus > 1)
    served = yaml.safe_load(pool_file(planned, ""))["models"]["llama"]["backends"]
    for kind in planned.replicas:
        limit = 2048 if kind.method is Method.EAGLE3 else None  # of the head that was measured
        assert values["replicas"][kind.name].get("drafterLimit") == limit
        assert served[f"{kind.name}-1"].get("drafter_limit") == limit
