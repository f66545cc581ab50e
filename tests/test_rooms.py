"""Each room can be taken away: what is left can be imported without it, and a gateway without any room serves."""

from __future__ import annotations

import ast
import shutil
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.support.command import gateway_command, until
from tests.support.paths import ROOT
from tests.support.upstream import upstreams_in_thread
from tests.support.waiting import TIMEOUT_S

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


@cache
def modules() -> dict[str, Path]:
    """Return all modules by name."""
    paths = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@cache
def needs() -> dict[str, set[str]]:
    """Return by module what it cannot be imported without."""
    return {name: set(imports(ROOT / path)) for name, path in modules().items()}


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that a module imports, but for those in functions and for types alone."""
    nodes: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(paths: list[str]) -> set[str]:
    """Return the modules at these paths and below."""
    return {name for name, path in modules().items() if any(path.is_relative_to(each) for each in paths)}


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_what_is_left_can_be_imported_without_a_room(room: str) -> None:
    gone = within(ROOMS[room])
    assert gone
    assert {name for name in modules().keys() - gone if not gone.isdisjoint(needs()[name])} == set()


@pytest.mark.slow
def test_a_gateway_without_any_room_serves(tmp_path: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    paths = [path for paths in ROOMS.values() for path in paths]
    for path in paths:
        shutil.rmtree(tmp_path / path, ignore_errors=True)
        (tmp_path / path).unlink(missing_ok=True)
    gone = within(paths)
    information = tmp_path / "speculation_gateway-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: speculation-gateway\nVersion: 0.1.0\n")
    lines = []
    for group, entries in tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "entry-points"
    ].items():
        lines += [f"[{group}]", *(f"{name} = {at}" for name, at in entries.items() if at.split(":")[0] not in gone)]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")
    pool = tmp_path / "one.yaml"
    with upstreams_in_thread(["one"], "m") as (upstream,):
        backends = {"one": {"method": "baseline", "url": upstream.url}}
        pool.write_text(yaml.safe_dump({"models": {"m": {"policy": {"name": "learned"}, "backends": backends}}}))
        with gateway_command(pool, tmp_path, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path) as gateway:
            until(lambda: gateway.get("/readyz").status_code == 200)
            body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
            assert gateway.post("/v1/chat/completions", body).status_code == 200, gateway.printed()
        pool.write_text(pool.read_text() + "recorder: {path: records}\n")
        with gateway_command(pool, tmp_path, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path) as gateway:
            assert gateway.process.wait(TIMEOUT_S) == 2
            assert "recorder: unknown key" in gateway.printed(), "its section is gone with it"
