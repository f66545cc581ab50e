"""External tools that check the files in deploy/."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.launch.vllm_command import vllm_serve_argv
from backends.speculation import Method
from tests.support.paths import ROOT

DEPLOY = ROOT / "deploy"


def vllm_options(argv: Sequence[str]) -> tuple[list[str], dict[str, list[Any]]]:
    """Return the words before the first option, and the values of each option, whose order means nothing."""
    first = next(index for index, word in enumerate(argv) if word.startswith("--"))
    options: dict[str, list[Any]] = {}
    for word in argv[first:]:
        if word.startswith("--"):
            values = options.setdefault(word, [])
        else:
            values.append(json.loads(word) if word.startswith("{") else word)
    return list(argv[:first]), options


def options_of_gateway(
    method: Method, model: str, names: Sequence[str], config: Mapping[str, Any], flags: Sequence[str] = ()
) -> tuple[list[str], dict[str, list[Any]]]:
    """Return the same for the command with which the gateway would start a replica, at port 8000 of all addresses."""
    return vllm_options(
        vllm_serve_argv(
            command=("vllm", "serve"),
            model=model,
            served_names=tuple(names),
            host="0.0.0.0",
            port=8000,
            method=method,
            speculative_config=config,
            flags=tuple(flags),
        )
    )


def tool(name: str) -> str:
    """Return the path of a command in this environment or on PATH."""
    path = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    assert path, f"these tests need {name!r}: scripts/test installs it (see scripts/apt-packages.txt, pyproject.toml)"
    return path


def replaced(text: str, replacements: Mapping[str, str]) -> str:
    """Return a configuration with other values, each of which stands for one that must be there."""
    for original, replacement in replacements.items():
        assert original in text
        text = text.replace(original, replacement)
    return text


def run(*argv: str | Path, cwd: Path = ROOT) -> str:
    """Run a tool, check that it succeeds, and return its output."""
    result = subprocess.run(
        [tool(str(argv[0])), *map(str, argv[1:])],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, f"{' '.join(map(str, argv))} exited with {result.returncode}:\n{result.stdout}"
    return result.stdout
