"""Each room can be taken away: without its folder, what is left imports, serves, and passes its own tests.

By default every room is deleted in a copy in turn, and a gateway answers a request there. With `ROOMS=picker,redis`, or
`ROOMS=all`, and `-o faulthandler_timeout=3600`, the fast tests of the packages that are left are run as well, which
takes minutes for each.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.support.command import gateway_command, until
from tests.support.paths import ROOT
from tests.support.upstream import upstreams_in_thread

PACKAGES = ("backends", "policies", "gateway", "lab")

ROOMS = {
    path.parent.name: [str(path.parent.relative_to(ROOT))] for path in sorted(ROOT.glob("gateway/rooms/*/__init__.py"))
}
ROOMS["recorder"].append("lab")  # which reads its records
ROOMS |= {
    "discovery by DNS": ["gateway/discovery/resolver.py"],
    "discovery in Kubernetes": ["gateway/discovery/kubernetes.py", "gateway/discovery/inference_pool.py"],
    "Redis": ["gateway/state/redis.py"],
    "simulator": ["backends/simulator", "lab"],
    "laboratory": ["lab"],
    "gateway calibrate": ["lab/calibrate", "lab/cli/calibrate.py"],
    "gateway plan": ["lab/plan", "lab/cli/plan.py"],
    "gateway tune": ["lab/tune", "lab/cli/tune.py"],
    "demo": ["lab/demo", "lab/cli/demo.py"],
}
"""What is deleted with each room: its folder, and the laboratory where that is made for it."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, in which modules are compiled once for all rooms."""
    folder = tmp_path_factory.mktemp("copy")
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in files.splitlines():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target, follow_symlinks=False)
    return folder


def modules(folder: Path, *packages: str) -> dict[str, Path]:
    """Return the modules of packages by name."""
    paths = [path for package in packages for path in (folder / package).rglob("*.py")]
    return {".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports(path: Path, *, at_once: bool = False) -> Iterator[str]:
    """Yield the modules that a module imports, and those that the names may be that it imports from packages.

    With `at_once`, only what it cannot be imported without: nothing in functions, and nothing for types alone.
    """
    nodes: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while nodes:
        node = nodes.pop()
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if at_once and (later or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))):
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@contextmanager
def without(folder: Path, paths: list[str], away: Path) -> Iterator[set[str]]:
    """Take a room and its entry points away, and put them back at the end; yield the modules that are gone."""
    before = modules(folder, *PACKAGES)
    for number, path in enumerate(paths):
        (folder / path).rename(away / str(number))
    gone = before.keys() - modules(folder, *PACKAGES).keys()
    information = folder / "speculation_gateway-0.1.0.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: speculation-gateway\nVersion: 0.1.0\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {at}" for name, at in entries.items() if at.split(":")[0] not in gone)]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")
    try:
        yield gone
    finally:
        for number, path in enumerate(paths):
            (away / str(number)).rename(folder / path)


def delete_tests(folder: Path, gone: set[str]) -> None:
    """Delete the tests that import what is gone."""
    before = modules(folder, "tests")
    while needless := {name for name, path in modules(folder, "tests").items() if not gone.isdisjoint(imports(path))}:
        for path in (before[name] for name in needless):
            if path.name == "conftest.py":
                assert path.parent.name not in {"tests", "gateway", "backends", "policies"}, f"{path} is for all"
                shutil.rmtree(path.parent)
            path.unlink(missing_ok=True)
        gone = gone | needless


def serve_one_request(copy: Path) -> None:
    with upstreams_in_thread(["one"], "m") as (upstream,):
        pool = copy / "one.yaml"
        backend = {"method": "baseline", "url": upstream.url}
        pool.write_text(
            yaml.safe_dump({"models": {"m": {"policy": {"name": "learned"}, "backends": {"one": backend}}}})
        )
        with gateway_command(pool, copy, env={"PYTHONPATH": str(copy)}, cwd=copy) as gateway:
            until(lambda: gateway.get("/readyz").status_code == 200, 10.0, gateway.printed())
            body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
            assert gateway.post("/v1/chat/completions", body).status_code == 200, gateway.printed()


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_a_room_can_be_taken_away(room: str, copy: Path, tmp_path: Path) -> None:
    with without(copy, ROOMS[room], tmp_path) as gone:
        assert gone
        left = modules(copy, *PACKAGES)
        assert {name for name, path in left.items() if not gone.isdisjoint(imports(path, at_once=True))} == set()
        if room == "laboratory" or not all(path.startswith("lab/") for path in ROOMS[room]):  # which it serves without
            serve_one_request(copy)
        if os.environ.get("ROOMS", "") == "all" or room in os.environ.get("ROOMS", "").split(","):
            rest = shutil.copytree(copy, tmp_path / "rest")
            for path in ROOMS[room]:
                shutil.rmtree(rest / "tests" / path, ignore_errors=True)
            delete_tests(rest, gone)
            env = {"PYTHONPATH": str(rest)}
            folders = [f"tests/{package}" for package in PACKAGES if (rest / "tests" / package).exists()]
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow and not vllm", *folders]
            tests = subprocess.run(command, cwd=rest, env={**os.environ, **env, "ROOMS": ""}, check=False)
            assert tests.returncode == 0
