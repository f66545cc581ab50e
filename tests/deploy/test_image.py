"""The Dockerfile, checked without building it: lint, build context and commands.

`scripts/check-deploy` runs its build step.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tomllib

import pytest

from backends.launch.ports import free_port
from tests.gateway.conftest import start_gateway
from tests.support.deploy_tools import DEPLOY, ROOT, run

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
    after_last_from = [name for name, _ in instructions()][::-1].index("FROM")
    final = instructions()[-after_last_from:]
    (user,) = [arguments for name, arguments in final if name == "USER"]
    assert re.fullmatch(r"[1-9]\d{4}:[1-9]\d{4}", user)
    assert not any("--chown" in arguments for name, arguments in final if name == "COPY")


def test_ports_and_paths_are_consistent() -> None:
    command = json.loads(only("ENTRYPOINT")) + json.loads(only("CMD"))
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert command[0] == "gateway"
    assert options == {"--config": "/etc/gateway/pool.yaml", "--host": "0.0.0.0", "--port": only("EXPOSE")}
    assert ("COPY", f"config/pool.yaml {options['--config']}") in instructions()
    assert f":{only('EXPOSE')}'" in only("HEALTHCHECK")


async def health_check(port: int) -> int:
    """Run the health check of the image against a local port, and return its exit status."""
    python, *arguments = json.loads(only("HEALTHCHECK").partition("CMD ")[2])
    assert python == "python"
    arguments = [argument.replace(f":{only('EXPOSE')}'", f":{port}'") for argument in arguments]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stderr=asyncio.subprocess.DEVNULL, env={"http_proxy": "http://127.0.0.1:9"}
    )
    return await process.wait()


@pytest.mark.slow
async def test_the_health_check_detects_whether_the_gateway_answers() -> None:
    async with start_gateway() as running:
        assert await health_check(int(running.url.rpartition(":")[2])) == 0
    assert await health_check(free_port("127.0.0.1")) == 1
