"""Grafana's dashboards are what the script makes of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.deploy_tools import DEPLOY
from tests.support.registered_metrics import sample_names

GRAFANA = DEPLOY / "grafana"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}


def expressions() -> Iterator[tuple[str, str]]:
    """Yield every expression with the place where it stands."""
    for name, dashboard in DASHBOARDS.items():
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", target["expr"]


def test_the_files_are_what_the_script_makes() -> None:
    command = [sys.executable, str(GRAFANA / "build.py"), "--check"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0, "run deploy/grafana/build.py"


def test_no_dashboard_names_a_data_source_and_ids_and_titles_differ() -> None:
    for dashboard in DASHBOARDS.values():
        assert set(re.findall(r'"uid": "([^"]*)"', json.dumps(dashboard))) == {"${datasource}", dashboard["uid"]}
        names = [variable["name"] for variable in dashboard["templating"]["list"]]
        assert names == ["datasource", "job", "instance", "model", "backend"]
        titles = [panel["title"] for panel in dashboard["panels"]]
        assert len(titles) == len(set(titles))
        assert all(panel["description"] for panel in dashboard["panels"])
    assert len({dashboard["uid"] for dashboard in DASHBOARDS.values()}) == len(DASHBOARDS)


@pytest.mark.slow
def test_expressions_use_only_existing_series() -> None:
    for place, expression in expressions():
        assert set(re.findall(r"\bgateway_\w+", expression)) <= sample_names(), place


def test_refused_requests_are_not_shown_as_a_replica_without_a_name() -> None:
    by_replica = [each for _, each in expressions() if re.search(r"by \(backend.*gateway_requests_total", each)]
    assert by_replica
    assert all('backend!=""' in each for each in by_replica)
