"""Every command of the documentation: run, or else accepted by the program that it names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.app import app
from tests.support.accepted_arguments import accept_module, accept_typer, help_of, options, source_of
from tests.support.command import ADMIN_KEY, Command, gateway_command, until
from tests.support.documentation import PAGES, Step, inline_steps, steps
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

CHECKED_ONLY: dict[str, tuple[str, ...]] = {
    "serves until it is stopped; `gateway` with the same pool runs here": ("scripts/run", "gateway serving", "envoy"),
    "installs, measures, or runs the tests": ("scripts/", "benchmarks/", "python -m benchmarks.", ".venv/bin/pytest"),
    "changes the checkout": (".venv/bin/pre-commit", "git", "cd"),
    "takes minutes or needs engines; its own tests run it": (
        *("gateway calibrate", "gateway replay TRACE --live", "gateway replay mine.jsonl --live", "gateway tune"),
        *("gateway plan", "gateway demo", "gateway status --watch", "gateway canary", "gateway compare"),
        *("gateway init", "gateway picker", "gateway advise"),
    ),
    "writes outside the checkout": ("/opt/gateway/bin/", "install", "openssl", "pip", "python3 -m venv"),
    "needs a container engine, a cluster, systemd or a release": ("docker", "helm", "kubectl", "systemctl", "gh"),
}
"""Beginnings of commands that are not run here, by the reason. Their program, options and files are checked."""

WORDS = {
    "N": "1",
    "M": "1",
    "TRACE": "trace.csv",
    "OUT": "out.jsonl",
    "FORMAT": "gateway",
    "FILE": "out.json",
    "JSON": "{}",
}
"""What is put for the words in capitals of a synopsis."""
FOLDERS = "backends|benchmarks|config|deploy|docs|gateway|lab|policies|scripts|tests"
PATHS = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]*\w")
PROGRAMS = {"cat", "curl", "export", "grep", "jq", "gateway"}
VERBS = {"status", "drain", "resume", "reload", "explain"}
SUBCOMMANDS = {"check", "schema", "policy", "trace", "replay"} | VERBS
INCOMPLETE = {"BadOptionUsage", "BadParameter", "MissingParameter", "NoArgsIsHelpError"}
STEPS = steps()


def is_run(step: Step) -> bool:
    return all(
        command[0] in PROGRAMS and (command[0] != "gateway" or set(command[1:2]) & SUBCOMMANDS) and not reason(command)
        for command in step.commands
    )


def reason(command: list[str]) -> str:
    serves = command[0] == "gateway" and not any(re.match(r"[a-z]+$", word) for word in command[1:2])
    name = "gateway serving" if serves else " ".join(command)
    return next((why for why, starts in CHECKED_ONLY.items() if name.startswith(starts)), "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that the pages assume."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "config", folder / "config")
    shutil.copy(ROOT / "config/pool.yaml", folder / "my-pool.yaml")
    (folder / "request.json").write_text('{"messages": [{"role": "user", "content": "Hello"}]}')
    code, mooncake = (
        f"tests/data/{name}" for name in ("AzureLLMInferenceTrace_code.csv", "mooncake_synthetic_trace.jsonl")
    )
    for path, data in (("trace.csv", code), ("requests/requests.csv", code), (mooncake, mooncake)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / data, folder / path)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Command]:
    pool = folder / "config/pool.yaml"
    with gateway_command(pool, folder, env={"XDG_STATE_HOME": str(folder)}) as command:
        until(lambda: command.get("/metrics").text.count('state="up"} 1.0') == 5, what="five replicas that are up")
        yield command


@pytest.fixture
def reader(folder: Path, served: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[[Step], str]:
    """Return what runs a step as a reader does, beside the gateway with the default pool, and returns its output."""
    values = {
        "GATEWAY_URL": served.url,
        "GATEWAY_ADMIN_KEY": ADMIN_KEY,
        "KEY": ADMIN_KEY,
        "COLUMNS": "200",
        "HOME": str(folder),
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)

    def run(step: Step) -> str:
        if [command[0] for command in step.commands] == ["gateway"]:  # in this process, which has the libraries
            result = CliRunner().invoke(app, filled(step.commands[0][1:]))
            assert result.exit_code == 0, f"{step}\n{result.output}"
            return result.output
        before = ['curl() { command curl --fail-with-body "$@"; }']
        before += [one.text for one in STEPS if one.is_prelude and one.block.page == step.block.page]
        text = re.sub(
            r"(localhost|127\.0\.0\.1):8080", served.url.removeprefix("http://"), "\n".join([*before, step.text])
        )
        text = re.sub(r"\b(\w*KEY)=\S+", rf"\1={ADMIN_KEY}", text)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text], capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, f"{step}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


def filled(words: list[str]) -> list[str]:
    """Return the words of a command with values for placeholders, and with what is optional."""
    return [WORDS.get(word.strip("[]"), word.strip("[]")) for word in words]


def test_the_commands_do_what_the_pages_show(reader: Callable[[Step], str], served: Command) -> None:
    steps_of_start_first = sorted(STEPS, key=lambda step: step.block.page != "docs/start.md")
    ran = [step for step in steps_of_start_first if is_run(step) or step.text == "scripts/run"]
    assert len(ran) >= 20
    for step in ran:
        printed = served.printed() if step.text == "scripts/run" else reader(step)
        for line in step.shown:
            if line != "..." and (word := re.search(r"[a-zA-Z][\w-]+", line)):
                assert word[0] in printed, f"{step}\nshows {line!r}, prints\n{printed}"


@pytest.mark.parametrize("step", [*STEPS, *inline_steps()], ids=str)
def test_programs_options_and_files_exist(step: Step, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))  # whatever goes wrong
    for command in step.commands:
        name = " ".join(command)
        assert is_run(step) or reason(command), f"run {name!r}, or say in CHECKED_ONLY why not"
        for path in PATHS.findall(name):
            assert (ROOT / path).exists() or "*" in name or is_run(step), path
        try:
            check(command, folder, monkeypatch)
        except Exception as error:  # a sentence may name a command without what it needs
            if step.block.language or type(error).__name__ not in INCOMPLETE:
                raise


def check(command: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    match [command[0].removeprefix(".venv/bin/"), *command[1:]]:
        case ["gateway", *arguments]:
            monkeypatch.chdir(folder)
            accept_typer(app, filled(arguments))
        case ["python", "-m", module, *arguments]:
            monkeypatch.setattr(sys, "argv", [module, *filled(arguments)])
            accept_module(module, monkeypatch)
        case [script, *arguments] if "/" in script and not script.startswith("/"):
            text = (ROOT / script).read_text() if (ROOT / script).is_file() else ""
            assert (ROOT / script).exists(), script
            assert os.access(ROOT / script, os.X_OK) or Path(script).suffix, script
            if run := re.search(r"python -m ([\w.]+) \"\$@\"", text):
                text += source_of(run[1])
            assert all(option in text or "pytest" in text for option in options(arguments) - {"--help"}), script
        case [program, *arguments] if shutil.which(Path(program).name) and options(arguments):
            usage = help_of(Path(program).name, arguments)
            assert not usage or all(option in usage for option in options(arguments)), (program, arguments)


def test_bodies_for_admin_are_declared_as_json() -> None:
    """Curl says that a body is a form, and `/admin` refuses that; `explain` takes the body of any request."""
    calls = [call for page in PAGES for call in page.read_text("utf-8").split("curl ")[1:]]
    shown = [one for call in calls if "/admin/" in (one := re.split(r"`|\n[${]", call)[0])]
    assert len(shown) >= 3
    for call in shown:
        assert " -d " not in call or "/admin/explain" in call or "application/json" in call, call
