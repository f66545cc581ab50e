"""The matrix of clients: what it runs, and how it judges; scripts/test-clients runs it."""

from __future__ import annotations

from pathlib import Path

from tests.clients.matrix import CASES, CLIENTS, COLUMNS, KNOWN, LOADS, Result, table


def test_every_script_is_run_and_every_known_fault_is_of_a_case() -> None:
    scripts = {Path(part).name for client in CLIENTS + LOADS for part in client.command if "{cases}" in part}
    assert scripts == {path.name for path in CASES.iterdir() if path.is_file()}
    for client, case in KNOWN:
        assert client in {each.name for each in CLIENTS}
        assert case in COLUMNS


def test_a_failure_is_ours_unless_it_is_known_and_a_known_one_must_fail() -> None:
    client, case = next(iter(KNOWN))
    results = [
        Result(client, "1", "chat", None),
        Result(client, "1", "stream", "broken"),
        Result(client, "1", case, "broken"),
        Result(client, "1", case, None),
    ]
    assert [result.is_ours for result in results] == [False, True, False, True]
    assert "| passed | FAILED |" in table(results[:3])
    assert f"fails ({KNOWN[client, case].whose})" in table(results[:3])
