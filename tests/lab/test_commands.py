"""What holds for every command that plays or reads a trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lab.parallel import all_cores
from tests.lab.invoked import refused, run
from tests.support.paths import CONFIG, DATA, ROOT
from tests.support.waiting import TIMEOUT_S, eventually_blocking

POOL = CONFIG / "pool.yaml"
COMMANDS = {
    "replay": ("--config", POOL),
    "plan": ("--config", POOL, "--replicas", 1, "--method", "baseline", "--jobs", 1),
    "tune": ("--config", POOL, "--trials", 1, "--out", "rules.yaml"),
    "trace show": (),
    "trace convert": ("out.jsonl",),
}
PLAYED = ("replay", "plan", "tune")
WRONG = [
    (("--format", "cvs"), "unknown format 'cvs'; the formats are gateway, azure", tuple(COMMANDS)),
    (("--strict",), "trace.jsonl:8: not JSON", tuple(COMMANDS)),
    (("--json", "/nowhere/figures.json"), "/nowhere/figures.json", (*PLAYED, "trace show")),
    (("--config", "nowhere.yaml"), "nowhere.yaml:1:1: cannot read it", PLAYED),
    (("--calibration", "abacus"), "abacus", PLAYED),
    (("--rate", "2", "--speed", "2"), "cannot be combined with --speed", PLAYED),
    (("--slo", "ttft"), "write it as ttft=0.5,tpot=0.02,e2e=10, in seconds", PLAYED),
    (("--slo", "itl=1"), "unknown bound 'itl'", PLAYED),
]


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace with a broken line, in the working folder."""
    monkeypatch.chdir(tmp_path)
    lines = (DATA / "mooncake_synthetic_trace.jsonl").read_bytes().splitlines()
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join([*lines[:7], b"{broken", *lines[7:]]))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "options", "message"),
    [(command, options, message) for options, message, commands in WRONG for command in commands],
)
def test_wrong_input_exits_2_with_a_message_alone(
    trace: Path, command: str, options: tuple[str, ...], message: str
) -> None:
    assert message in refused(command, trace, *COMMANDS[command], *options)


@pytest.mark.parametrize("option", ["--json", "--report"])
def test_a_file_that_cannot_be_written_exits_2(trace: Path, option: str) -> None:
    status, _, error = run("replay", trace, *COMMANDS["replay"], option, "/dev/full")
    assert status == 2
    assert error.endswith("gateway replay: /dev/full: cannot write the file: No space left on device\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_trace_that_is_missing_or_can_be_read_once_exits_2(trace: Path, command: str) -> None:
    assert "none.jsonl: No such file" in refused(command, "none.jsonl", *COMMANDS[command])
    os.mkfifo("pipe")
    assert "pipe: is a pipe or a device" in refused(command, "pipe", *COMMANDS[command])


@pytest.mark.slow
@pytest.mark.parametrize("command", ["replay", "plan", "trace show", "trace convert"])
def test_broken_lines_are_reported_and_skipped(trace: Path, command: str) -> None:
    status, _, error = run(command, trace, *COMMANDS[command])
    assert status == 0
    assert "trace.jsonl:8: not JSON" in error


def test_ctrl_c_is_left_to_the_process_that_has_started_the_others() -> None:
    with all_cores(signal.getsignal, jobs=2) as run_all:
        assert run_all([signal.SIGINT]) == [signal.SIG_IGN]


@pytest.mark.slow
def test_sigterm_leaves_no_part_of_the_trace(trace: Path, tmp_path: Path) -> None:
    arguments = map(str, ("plan", trace, *COMMANDS["plan"]))
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-m", "gateway", *arguments], env=environment) as process:
        eventually_blocking(lambda: any(tmp_path.glob("gateway-trace-*")))
        process.terminate()
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert not [*tmp_path.glob("gateway-trace-*")]
