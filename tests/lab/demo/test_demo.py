"""The demo, shortened: from the command to Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from lab.demo.run import all_up
from tests.support.command import alive, family, until
from tests.support.paths import ROOT

COMMAND = (sys.executable, "-m", "gateway", "demo", "--phase-s", "8", "--rate", "16")


@pytest.mark.parametrize(("states", "is_so"), [(("up", "starting"), False), (("up", "up"), True)])
def test_it_begins_once_all_replicas_are_up(states: tuple[str, ...], *, is_so: bool) -> None:
    backends = {f"b{number}": {"state": state} for number, state in enumerate(states)}
    pool = httpx.MockTransport(lambda _: httpx.Response(200, json={"models": {"m": {"backends": backends}}}))
    with httpx.Client(transport=pool, base_url="http://gateway") as client:
        assert all_up(client) is is_so


@pytest.mark.slow
def test_the_demo_learns_rules_moves_traffic_and_leaves_nothing_behind(tmp_path: Path) -> None:
    output, folder = tmp_path / "output", tmp_path / "temporary"
    folder.mkdir()
    with output.open("w") as stdout:
        environment = {**os.environ, "TMPDIR": str(folder)}
        demo = subprocess.Popen(
            COMMAND, cwd=ROOT, env=environment, stdout=stdout, stderr=stdout, start_new_session=True
        )
    try:
        until(
            lambda: (
                demo.poll() is not None or len(re.findall(r"\n(no rules yet|rules, version)", output.read_text())) == 4
            ),
            what="four phases",
        )
        printed = output.read_text()
        assert re.search(r"rules, version 1: \d+ rules", printed), printed
        assert "failed" not in printed
        shares = [int(share) for share in re.findall(r"demo +\d+ +0 .*tree (\d+)%", printed)]
        assert len(shares) == 4, printed
        assert shares[0] < shares[1] > shares[2], printed  # code edits go to suffix drafting, and chat does not
        assert shares[1] + shares[3] > shares[0] + shares[2], printed
        match = re.search(r"Open (\S+)/dashboard#key=(\w+)", printed)
        assert match, printed
        headers = {"authorization": f"Bearer {match[2]}"}
        snapshot = httpx.get(f"{match[1]}/admin/dashboard/snapshot", headers=headers, trust_env=False)
        assert snapshot.is_success
        processes = family(demo.pid)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(30.0) == 0
        until(lambda: not alive(processes), 10.0)
        assert [path.name for path in folder.iterdir() if path.name.startswith("gateway-demo-")] == []
    finally:
        demo.kill()
        demo.wait()
