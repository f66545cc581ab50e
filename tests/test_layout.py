"""The layout: imports go one way, the laboratory stays out of serving, and no folder grows without bound."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGES = ("backends", "policies", "gateway", "lab")
"""Each may import itself and those before it."""

MOST_FILES = 17

NETWORK = {"httpx", "socket", "asyncio", "redis", "sqlite3", "subprocess", "urllib", "fastapi", "uvicorn"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(tree(path))]


def imported(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            yield str(node.module)


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    later = set(PACKAGES[PACKAGES.index(package) + 1 :]) | {"tests", "benchmarks"}
    wrong = {(path.name, name) for path in modules(package) for name in imported(path) if name.split(".")[0] in later}
    assert wrong == set()


@pytest.mark.slow
def test_policies_do_no_network_io_and_import_no_simulator() -> None:
    for path in modules("policies"):
        for name in imported(path):
            assert name.split(".")[0] not in NETWORK, f"{path} imports {name}"
            assert not name.startswith("backends.simulator"), f"{path} imports {name}"


@pytest.mark.slow
def test_the_core_imports_no_room() -> None:
    core = (path for path in modules("gateway") if not path.is_relative_to(ROOT / "gateway/rooms"))
    wrong = {(path.name, name) for path in core for name in imported(path) if name.startswith("gateway.rooms.")}
    assert wrong == set()


@pytest.mark.slow
def test_one_name_means_one_thing() -> None:
    """A public class of the gateway has its name for itself."""
    names = Counter(
        node.name
        for path in modules("gateway")
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == set()


def test_compiled_modules_have_no_final_tuple_of_floats_alone() -> None:
    """Compiled by mypyc, such a name raises `NameError` where it is used; `Final[tuple[float, ...]]` does not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    found = []
    for name in project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["mypyc"]["include"]:
        for node in ast.parse((ROOT / name).read_text("utf-8")).body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "Final":
                values = node.value.elts if isinstance(node.value, ast.Tuple) else []
                if values and all(isinstance(one, ast.Constant) and isinstance(one.value, float) for one in values):
                    found.append(f"{name}: {ast.unparse(node.target)}")
    assert found == []


@pytest.mark.slow
def test_serving_imports_no_compiler_and_neither_scikit_learn_nor_scipy() -> None:
    program = """
import pathlib, sys
import gateway.cli.app, gateway.cli.check
from gateway.gateway import rooms
import gateway.service.app, gateway.service.run, gateway.service.server, gateway.service.workers
from policies.policy import policies
[*rooms()], policies(), gateway.cli.check.read_pool(pathlib.Path("config/pool.yaml"))
print(sorted({"numba", "sklearn", "scipy"} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


def imported_modules(path: Path, names: Collection[str]) -> set[str]:
    found = set[str]()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {member for member in members if member in names} or {str(node.module)} & set(names)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in names}
    return found


@pytest.mark.slow
def test_files_do_not_import_each_other_in_circles() -> None:
    """Imports for types alone count too."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for each in PACKAGES for path in modules(each)
    }
    arrows = {name: imported_modules(path, names) - {name} for name, path in names.items()}
    TopologicalSorter(arrows).prepare()  # raises CycleError with the first circle


def test_folders_stay_small() -> None:
    files = Counter(path.parent for package in PACKAGES for path in modules(package))
    assert {str(folder): count for folder, count in files.items() if count > MOST_FILES} == {}


SCRIPTED_PEER = {"wire", "reader", "writer"}
"""Arguments that tell a function of a scripted peer: only those may sleep, to play a slow one."""


def sleeps(tree: ast.AST, in_peer: bool = False) -> Iterator[int]:
    """Yield the lines that sleep for longer than 0 s, outside scripted peers."""
    for node in ast.iter_child_nodes(tree):
        peer = in_peer
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            peer = in_peer or bool(SCRIPTED_PEER & {argument.arg for argument in node.args.args})
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep":
            yields = isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            if not peer and not yields:
                yield node.lineno
        yield from sleeps(node, peer)


@pytest.mark.slow
def test_tests_wait_for_conditions_instead_of_sleeping() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "support"]
    files = [path for path in files if ".sleep(" in path.read_text("utf-8")]
    found = {str(path.relative_to(ROOT)): lines for path in files if (lines := list(sleeps(tree(path))))}
    assert found == {}
