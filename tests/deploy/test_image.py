"""The Dockerfile, checked without building it: lint, build context and commands.

`scripts/check-deploy` runs its build step, its command and its health check.
"""

from __future__ import annotations

import json
import re
import tomllib

from tests.support.deploy_tools import DEPLOY, run
from tests.support.paths import ROOT

DOCKERFILE = DEPLOY / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments) in order, with continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text()).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def only(instruction: str) -> str:
    (arguments,) = [arguments for name, arguments in instructions() if name == instruction]
    return arguments


def from_context() -> list[str]:
    """Return the paths copied from the build context."""
    copies = [arguments.split() for name, arguments in instructions() if name == "COPY"]
    return [source for words in copies if not words[0].startswith("--from") for source in words[:-1]]


def test_hadolint_reports_nothing() -> None:
    assert run("hadolint", DOCKERFILE) == ""


def test_the_build_context_is_exactly_what_is_copied() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == set(from_context())
    assert [line for line in lines[1:] if not line.startswith("!")] == ["**/__pycache__", "**/*.so"]
    assert all((ROOT / source).exists() for source in from_context())


def test_all_sources_of_the_wheel_are_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {
        *wheel["packages"],
        wheel["hooks"]["custom"]["path"],
        project["project"]["readme"],
        *project["project"]["license-files"],
    } <= set(from_context())


def test_it_runs_as_a_numeric_user_that_owns_no_files() -> None:
    assert re.fullmatch(r"[1-9]\d{4}:[1-9]\d{4}", only("USER"))
    assert not any("--chown" in arguments for name, arguments in instructions() if name == "COPY")


def test_ports_and_paths_are_consistent() -> None:
    command = json.loads(only("ENTRYPOINT")) + json.loads(only("CMD"))
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert command[0] == "gateway"
    assert options == {"--config": "/etc/gateway/pool.yaml", "--host": "0.0.0.0", "--port": only("EXPOSE")}
    assert ("COPY", f"config/pool.yaml {options['--config']}") in instructions()
    assert f":{only('EXPOSE')}'" in only("HEALTHCHECK")
