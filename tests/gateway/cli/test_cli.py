"""The command line: output and exit statuses."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from backends.launch.ports import free_port
from gateway.cli.app import app
from gateway.cli.check import read_pool
from gateway.cli.output import say_json
from gateway.config.load import load_pool
from gateway.routing.keys import digest
from tests.support.command import ADMIN_KEY, gateway_command, until
from tests.support.paths import ROOT
from tests.support.waiting import TIMEOUT_S

SMALL = """\
models:
  llama:
    policy: {name: round_robin}
    backends:
      plain: {method: baseline, url: "http://127.0.0.1:9"}
      lookup: {method: ngram, url: "http://127.0.0.1:10", speculative_config: {num_speculative_tokens: 5}}
"""


def gateway(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """Return a pool file with two errors, whose replica would create a file if it were started."""
    path = tmp_path / "wrong.yaml"
    path.write_text(
        f"""\
models:
  llama:
    policy: {{name: round_robin}}
    backends:
      started:
        method: baseline
        serve: {{command: [touch, {tmp_path}/started], model: m}}
      plain: {{metod: baseline, url: "http://127.0.0.1:9"}}
keys: [{{name: a}}]
"""
    )
    return path


@pytest.mark.parametrize("command", [(), ("check",)], ids=["serve", "check"])
def test_all_errors_of_a_file_are_printed_and_nothing_is_started(wrong: Path, command: tuple[str, ...]) -> None:
    run = gateway(*command, "--config", wrong)
    assert (run.exit_code, run.stdout) == (2, "")
    assert run.stderr.splitlines() == [
        f"{wrong}:8:15: models.llama.backends.plain.metod: unknown key; did you mean 'method'?",
        f"{wrong}:9:8: keys[0]: has neither key nor sha256; set one of the two",
    ]
    assert [path.name for path in wrong.parent.iterdir()] == ["wrong.yaml"]


@pytest.mark.parametrize("command", [(), ("check",)], ids=["serve", "check"])
def test_a_certificate_that_cannot_be_used_is_an_error(small: Path, command: tuple[str, ...]) -> None:
    small.write_text(SMALL + "server: {tls: {certificate: /none.crt, key: /none.key}}\n")
    run = gateway(*command, "--config", small)
    assert run.exit_code == 2
    assert "server.tls: /none.crt and /none.key cannot be used (/none.key: No such file or directory)" in run.stderr


def test_check_prints_the_pool_where_state_is_kept_and_what_was_asked(small: Path) -> None:
    run = gateway("check", "--config", small)
    assert (run.exit_code, run.stderr) == (0, "")
    assert ["lookup", "ngram", "5", "http://127.0.0.1:10"] in [line.split() for line in run.stdout.splitlines()]
    assert "State is kept in" in run.stdout
    assert run.stdout.splitlines()[-1] == "Compared with the metrics of 0 of 2 engines."


@pytest.mark.parametrize(
    "arguments", [("--port", "70000"), ("--workers", "0"), ("--port", "x"), ("--prot", "1"), ("chek",)]
)
def test_wrong_options(arguments: tuple[str, ...]) -> None:
    run = gateway(*arguments)
    assert run.exit_code == 2
    assert "Usage:" in run.stderr


@pytest.mark.slow
def test_options_override_the_file_and_commands_take_the_gateways_admin_key(small: Path, tmp_path: Path) -> None:
    other = "  other: {backends: {a: {url: 'http://127.0.0.1:11'}}}\n"
    small.write_text(SMALL + other + "server: {host: 127.0.0.1, port: 1}\n")
    with gateway_command(small, tmp_path, "--host", "127.0.0.2") as running:
        assert running.url.startswith("http://127.0.0.2:")
        printed = running.printed()
        assert "http://127.0.0.1:10" in printed
        assert "Open: no keys are set" in printed
        assert "Not every model has a replica yet: requests wait" in printed
        assert "Admin key of this run" not in printed
        environ = {"GATEWAY_URL": running.url, "GATEWAY_ADMIN_KEY": ADMIN_KEY}
        result = CliRunner().invoke(app, ["status"], env=environ)
        assert result.exit_code == 0, result.stderr
        result = CliRunner().invoke(app, ["status"], env={**environ, "GATEWAY_ADMIN_KEY": "another"})
        assert "this key is not accepted" in result.stderr
        assert running.end() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imported", "heavy"),
    [("gateway.cli.app", {"numpy", "policies"}), ("gateway.config.load", {"fastapi", "uvicorn", "httpx", "rich"})],
)
def test_commands_import_no_more_than_they_need(imported: str, heavy: set[str]) -> None:
    """`gateway status` and `gateway check` must answer at once."""
    code = f"import sys, gateway.cli.app, {imported}; print(*({heavy} & {{*sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert run.stdout.split() == []


@pytest.mark.slow
@pytest.mark.parametrize("line", [("schema",), ("--help",)])
def test_a_full_disk_is_said_in_a_line(line: tuple[str, ...]) -> None:
    words = [sys.executable, "-m", "gateway", *line]
    with open("/dev/full", "w") as full:
        run = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (run.returncode, run.stderr) == (1, b"gateway: [Errno 28] No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize(("output", "said"), [(">/dev/full", 1), ("<&- >&- 2>&-", 0)])
def test_a_gateway_whose_output_nobody_takes_serves_on(small: Path, output: str, said: int) -> None:
    line, port = ["sh", "-c", f'exec "$@" {output}', "sh", sys.executable, "-m", "gateway", "--config"], free_port()
    small.write_text(f"{SMALL}server: {{port: {port}}}\nstate: none\n")
    environ = os.environ | {"TMPDIR": str(small.parent)}
    with subprocess.Popen([*line, str(small)], cwd=ROOT, stderr=subprocess.PIPE, env=environ) as process:
        until(lambda: httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200)
        (run_dir,) = small.parent.glob("gateway-*")
        with pytest.raises(BlockingIOError):  # else systemd-tmpfiles would remove what it has not touched for days
            fcntl.flock(os.open(run_dir, os.O_DIRECTORY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.terminate()
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors.count(b"standard output cannot be written")) == (0, said)


def test_errors_of_a_file_as_json(wrong: Path) -> None:
    result = CliRunner().invoke(app, ["check", "--json", "--config", str(wrong)])
    assert result.exit_code == 2
    document = json.loads(result.stdout)
    assert document["file"] == str(wrong)
    assert [f"{wrong}:{each['line']}:{each['column']}" for each in document["errors"]] == [
        line.partition(": ")[0] for line in result.stderr.splitlines()
    ]
    assert {each["where"] for each in document["errors"]} >= {"models.llama.backends.plain.metod", "keys[0]"}


def test_documents_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[2J\x7f\x9b31m\u202eé"
    say_json({"name": hostile})
    printed = capsys.readouterr().out
    assert printed.strip().isascii()
    assert printed.strip().isprintable()
    assert json.loads(printed) == {"name": hostile}


@pytest.mark.parametrize(
    ("named", "is_taken"),
    [
        ("", True),
        ("admin: {listen: '127.0.0.1:0'}", True),
        ("admin: {key: its-own}", False),
        ("keys: [{name: reader, key: from-outside, admin: read}]", False),
    ],
)
def test_the_key_of_the_environment_takes_the_place_of_no_other(
    small: Path, monkeypatch: pytest.MonkeyPatch, named: str, *, is_taken: bool
) -> None:
    small.write_text(f"{SMALL}{named}\n")
    monkeypatch.setenv("GATEWAY_ADMIN_KEY", "from-outside\n")
    assert (read_pool(small).admin.digest == digest("from-outside")) is is_taken
    monkeypatch.setenv("GATEWAY_ADMIN_KEY", "")
    assert read_pool(small).admin.digest == load_pool(small).admin.digest


def test_ctrl_c_while_modules_are_imported_ends_it_quietly(tmp_path: Path) -> None:
    # Where the tests run with SIGINT ignored, as after `nohup`, the child would inherit that.
    handled = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    (tmp_path / "typer.py").write_text(f"{handled}print('importing', flush=True)\nsignal.pause()\n")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    with subprocess.Popen(
        [sys.executable, "-m", "gateway"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=TIMEOUT_S) == (b"", b"")
    assert process.returncode == 130
