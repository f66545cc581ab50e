"""The Prometheus configuration and rules, checked by promtool."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.support.deploy_tools import DEPLOY, run
from tests.support.paths import ROOT
from tests.support.registered_metrics import sample_names

pytestmark = pytest.mark.slow

RULES = DEPLOY / "prometheus/rules.yml"
UNIT_TESTS = ROOT / "tests/deploy/rules.test.yml"


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    output = run("promtool", "check", "config", "--lint=all", "--lint-fatal", DEPLOY / "prometheus/prometheus.yml")
    assert f"{len(rules())} rules found" in output


def test_the_rules_pass_their_unit_tests() -> None:
    assert "SUCCESS" in run("promtool", "test", "rules", UNIT_TESTS)


def test_every_alert_has_a_case_that_fires_and_one_that_waits() -> None:
    cases = [
        case for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"] for case in test.get("alert_rule_test", [])
    ]
    fired = {case["alertname"] for case in cases if case["exp_alerts"]}
    quiet = {case["alertname"] for case in cases if not case["exp_alerts"]}
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert fired == set(alerts)
    waiting = {name for name, alert in alerts.items() if "for" in alert}
    assert waiting - {"GatewayFailures"} <= quiet  # tested together with GatewayStreamsInterrupted


def test_the_rules_use_only_existing_series() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        expression = re.sub("|".join(map(re.escape, recorded)), "", rule["expr"])
        assert set(re.findall(r"\bgateway_\w+", expression)) <= sample_names(), rule


def test_every_alert_has_a_severity_a_summary_and_a_section_of_the_runbook() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    for alert in alerts:
        assert alert["labels"]["severity"] in {"page", "ticket"}
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["runbook_url"] == f"docs/runbook.md#{alert['alert'].lower()}"
    sections = re.findall(r"^### (Gateway\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    assert sections == [alert["alert"] for alert in alerts]


def test_no_alert_fires_where_what_is_optional_is_off() -> None:
    (off,) = [test for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"] if "turned off" in test["name"]]
    quiet = [case["alertname"] for case in off["alert_rule_test"] if not case["exp_alerts"]]
    assert quiet == [rule["alert"] for rule in rules() if "alert" in rule]
