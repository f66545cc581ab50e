"""The systemd unit, checked by systemd-analyze."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from backends.launch.supervisor import GROUP_END_S, LaunchSpec
from gateway.config.load import load_pool
from gateway.service.workers import _GRACE_S as WORKER_GRACE_S
from tests.support.deploy_tools import DEPLOY, run
from tests.support.paths import ROOT

UNIT, SOCKET = DEPLOY / "gateway.service", DEPLOY / "gateway.socket"


def value(name: str) -> str:
    (setting,) = re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(setting)


def test_systemd_analyze_accepts_it(tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "gateway"
    assert command.is_file()
    unit = tmp_path / UNIT.name  # systemd checks that the command exists
    unit.write_text(re.sub(r"(?m)^(ExecStart=)\S+", rf"\g<1>{command}", UNIT.read_text()))
    socket = tmp_path / SOCKET.name
    socket.write_text(SOCKET.read_text())
    assert run("systemd-analyze", "verify", "--man=no", unit, socket) == ""  # warnings do not change its exit status


def test_it_is_sandboxed() -> None:
    output = run("systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=20", UNIT)
    assert re.search(r"Overall exposure level .*: [01]\.\d OK", output), output


def test_its_paths_are_those_of_the_readme() -> None:
    readme = (DEPLOY / "README.md").read_text()
    assert value("ExecStart") == "/opt/gateway/bin/gateway --config /etc/gateway/pool.yaml"
    assert value("DynamicUser") == "yes"
    for path in ("/opt/gateway", "/etc/gateway/pool.yaml", value("EnvironmentFile").removeprefix("-")):
        assert path in readme


def test_systemd_waits_for_draining_and_signals_only_the_main_process() -> None:
    drain_s = max(load_pool(path).server.drain_s for path in (ROOT / "config").glob("pool*.yaml"))
    launched_s = LaunchSpec("", (), (), {}, Path()).shutdown_timeout_s + GROUP_END_S
    assert float(value("TimeoutStopSec")) >= drain_s + WORKER_GRACE_S + launched_s
    assert value("KillMode") == "mixed"
