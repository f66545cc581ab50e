"""docs/metrics.md lists exactly the series that the code registers."""

from __future__ import annotations

import re

from backends.health import State
from gateway.routing.series import OUTCOMES, temperature_bucket
from tests.support.deploy_tools import ROOT
from tests.support.registered_metrics import Series, registered, sample_names

PAGE = (ROOT / "docs/metrics.md").read_text().replace("*replica*", "model, backend, method")
ROW = re.compile(r"^\| `(gateway_\w+)` \| (\w+) \|(?: ([\w, ]+))? \| .+ \|$", re.MULTILINE)


def test_the_page_lists_every_series_once_with_its_type_and_labels() -> None:
    rows = [Series(name, kind, tuple(labels.split(", ")) if labels else ()) for name, kind, labels in ROW.findall(PAGE)]
    assert len(rows) == len(set(rows)) == PAGE.count("\n| `")
    assert set(rows) == registered()


def test_the_page_names_every_state_and_temperature_bucket() -> None:
    assert all(f"`{state}`" in PAGE for state in State)
    buckets = {temperature_bucket(hundredths / 100) for hundredths in range(201)}
    assert len(buckets) == 6
    assert all(f"`{bucket}`" in PAGE for bucket in buckets)


def test_the_page_names_every_outcome() -> None:
    assert all(f"`{outcome}`:" in PAGE for outcome in (*OUTCOMES, "refused"))


def test_the_examples_use_only_existing_series() -> None:
    queries = re.findall(r"```promql\n(.+?)```", PAGE, re.DOTALL)
    assert len(queries) >= 5
    assert set(re.findall(r"gateway_\w+", "".join(queries))) <= sample_names()
