"""Shell completion of the installed command, through the protocol of each shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from gateway.cli.completion import models
from tests.support.paths import ROOT

GATEWAY = Path(sys.executable).parent / "gateway"
OTHER = "models: {one: {}, two: {}, other: {}}\nkeys: ${UNSET}\n"


def run(*argv: str | Path, **environ: str) -> str:
    """Run a command where config/pool.yaml is the default pool file."""
    done = subprocess.run(
        argv, cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def completed(line: str) -> list[str]:
    """Return what the last word of a line may become, as bash asks for it."""
    words = line.split(" ")
    return run(GATEWAY, _GATEWAY_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1)).split()


@pytest.mark.slow
def test_bash_completes_commands() -> None:
    script = 'eval "$(_GATEWAY_COMPLETE=source_bash "$0")"; COMP_WORDS=(gateway pol); COMP_CWORD=1; '
    assert run("bash", "-c", script + '_gateway_completion "$0"; echo "${COMPREPLY[@]}"', GATEWAY) == "policy\n"


@pytest.mark.slow
def test_zsh_and_fish_complete_options_of_the_lab() -> None:
    line = "gateway replay --reg"
    fish = {"_GATEWAY_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert run(GATEWAY, **fish, _TYPER_COMPLETE_ARGS=line).startswith("--regret\tAlso replay")
    assert '"--regret":"Also replay' in run(GATEWAY, _GATEWAY_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=line)
    for shell in ("zsh", "fish"):
        assert f"complete_{shell}" in run(GATEWAY, _GATEWAY_COMPLETE=f"source_{shell}")


@pytest.mark.slow
def test_values_are_completed(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(OTHER)
    assert completed("gateway policy show --model ") == ["llama-3.1-8b"]
    assert completed(f"gateway replay --config {other} --model o") == ["one", "other"]
    assert completed("gateway replay --policy least_l") == ["least_loaded"]
    assert "llama-3.1-8b-h100" in completed("gateway plan --calibration llama-3.1-8b-h")


@pytest.mark.parametrize("content", [None, b"\xff", b"[]", b"models: 3", b"{"])
def test_a_pool_file_that_cannot_be_read_completes_nothing(tmp_path: Path, content: bytes | None) -> None:
    context = click.Context(click.Command("replay"))
    context.params = {"config": tmp_path / "broken.yaml"}
    if content is not None:
        context.params["config"].write_bytes(content)
    assert models(context, "") == []
