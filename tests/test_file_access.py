"""Where the packages open, look at or list files: by `backends.files.regular`, or at a place that was reviewed.

A new place calls `read_file` or `read_text`, in a thread where an event loop runs; or it is added below, with the
reason why it holds up nobody.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from tests.support.paths import ROOT

PACKAGES = ("backends", "gateway", "policies")

METHODS = {
    *("open", "fdopen", "open_code", "read_bytes", "read_text", "write_text", "write_bytes", "touch", "mmap"),
    *("mkdir", "makedirs", "mkdtemp", "TemporaryFile", "NamedTemporaryFile", "unlink", "rmtree", "copyfile", "which"),
    *("stat", "lstat", "exists", "is_file", "is_dir", "iterdir", "glob", "rglob", "listdir", "scandir", "readlink"),
    *("load_cert_chain", "load_verify_locations", "create_default_context", "FileHandler"),
    *("fromfile", "loadtxt", "genfromtxt"),
}
CALLS = {"sqlite3.connect", "np.load", "os.rename", "os.replace", "os.walk", "shutil.copy", "shutil.move"}
BOUNDED = {"read_file", "read_text"}

PACKAGE = "a file of the package itself"
OWN = "in the folder that this run has made for itself"
COMMAND = "in a command, which serves nobody"
START = "before anything is served"
THREAD = "in a thread of its own, for which nobody waits"
ELSEWHERE = "in another process"
NO_FILE = "opens no file"

REVIEWED = {
    "backends/calibration/base_engines.py:_rows": PACKAGE,
    "backends/calibration/files.py:calibration_names": PACKAGE,
    "backends/calibration/files.py:context_shift": PACKAGE,
    "backends/calibration/gpus.py:gpus": PACKAGE,
    "backends/calibration/draft_profile.py:_entries": PACKAGE,
    "backends/background.py:leave_stdout": "the null device",
    "backends/files/regular.py:read_file": "the one place",
    "backends/files/own_folder.py:check_own": OWN,
    "backends/files/own_folder.py:make_own": OWN,
    "backends/http/authorities.py:renew": THREAD,
    "backends/http/authorities.py:trusted": "once, in a thread if it is served already",
    "backends/launch/supervisor.py:EngineProcess.start": OWN,
    "backends/launch/supervisor.py:_last_lines": OWN,
    "backends/launch/supervisor.py:_rotate": OWN,
    "backends/launch/supervisor.py:check_command": START,
    "backends/simulator/__main__.py:main": ELSEWHERE,
    "backends/simulator/engine/compiled.py:_cache_folder": ELSEWHERE,
    "backends/simulator/engine/fleet.py:load_rules": ELSEWHERE,
    "backends/simulator/text/language.py:code": ELSEWHERE,
    "gateway/rooms/advice/advise.py:known_troubles": PACKAGE,
    "gateway/rooms/batches/storage.py:Storage._opened": THREAD,
    "gateway/rooms/batches/storage.py:Storage._sizes": THREAD,
    "gateway/rooms/batches/storage.py:Storage.append": THREAD,
    "gateway/rooms/batches/storage.py:Storage.hold": THREAD,
    "gateway/rooms/batches/storage.py:Storage.names": THREAD,
    "gateway/rooms/batches/storage.py:Storage.remove": THREAD,
    "gateway/rooms/batches/storage.py:Storage.write": THREAD,
    "gateway/rooms/batches/storage.py:_private": THREAD,
    "gateway/rooms/compare/comparing.py:report": COMMAND,
    "gateway/rooms/compare/report.py:_page": PACKAGE,
    "gateway/cli/init.py:_named": COMMAND,
    "gateway/cli/init.py:init": COMMAND,
    "gateway/discovery/api_server.py:ApiServer.client": "authorities that were read already",
    "gateway/__main__.py:main": "the null device",
    "gateway/http/paths.py:": PACKAGE,
    "gateway/listening/certificate.py:Certificate._context": "in memory",
    "gateway/listening/certificate.py:_in_memory": "in memory",
    "gateway/rooms/picker/ext_proc_pb2.py:": PACKAGE,
    "gateway/rooms/recorder/files.py:TraceFiles._is_in_place": THREAD,
    "gateway/rooms/recorder/files.py:TraceFiles._open": THREAD,
    "gateway/rooms/recorder/files.py:TraceFiles._remove_old": THREAD,
    "gateway/rooms/recorder/files.py:TraceFiles.write": THREAD,
    "gateway/rooms/recorder/files.py:_remove_unless_locked": THREAD,
    "gateway/rooms/recorder/hashes.py:_load": START,
    "gateway/rooms/recorder/recorder.py:recorder_issue": THREAD,
    "gateway/relay/attempt.py:Attempt.on_head": NO_FILE,
    "gateway/reload/watch.py:stamp_of": THREAD,
    "gateway/service/replicas.py:_found": THREAD,
    "gateway/service/replicas.py:_launch_simulator": OWN,
    "gateway/service/stores.py:read_launched": OWN,
    "gateway/service/stores.py:write_launched": OWN,
    "gateway/peers/live.py:LiveFolder.exchange": THREAD,
    "gateway/peers/live.py:LiveFolder.leave": THREAD,
    "gateway/state/sqlite.py:SqliteStore._opened": THREAD,
    "gateway/state/sqlite.py:_open": THREAD,
    "gateway/state/sqlite.py:open_file": THREAD,
    "gateway/telemetry/allocated.py:AllocatedValues.__init__": OWN,
    "gateway/telemetry/allocated.py:AllocatedValues._init_value": "in memory",
    "gateway/telemetry/allocated.py:AllocatedValues._allocate": OWN,
    "gateway/telemetry/registry.py:_catalogue": PACKAGE,
    "policies/rules/rule.py:default_rules": PACKAGE,
}


def calls(tree: ast.AST, within: str = "", *, is_async: bool = False) -> Iterator[tuple[str, ast.expr, bool]]:
    """Yield what is called, the function that does, and whether that runs on an event loop."""
    for node in ast.iter_child_nodes(tree):
        inner, is_inner_async = within, is_async
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{within}.{node.name}".lstrip(".")
            is_inner_async = isinstance(node, ast.AsyncFunctionDef)
        if isinstance(node, ast.Call):
            yield within, node.func, is_async
        yield from calls(node, inner, is_async=is_inner_async)


def accesses_files(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in METHODS - BOUNDED
    return isinstance(function, ast.Attribute) and (function.attr in METHODS or ast.unparse(function) in CALLS)


@cache
def of_packages() -> list[tuple[str, ast.expr, bool]]:
    return [
        (f"{path.relative_to(ROOT)}:{within}", function, is_async)
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for within, function, is_async in calls(ast.parse(path.read_text("utf-8")))
    ]


@pytest.mark.slow
def test_files_are_opened_at_reviewed_places_only() -> None:
    found = {place for place, function, _ in of_packages() if accesses_files(function)}
    assert found - REVIEWED.keys() == set(), "not reviewed"
    assert REVIEWED.keys() - found == set(), "nothing is opened there any more"


@pytest.mark.slow
def test_no_file_is_read_on_an_event_loop() -> None:
    read = [
        place
        for place, function, is_async in of_packages()
        if is_async and isinstance(function, ast.Name) and function.id in {*BOUNDED, "trusted"}
    ]
    assert read == []
