"""The simulator process: start-up time, reports of invalid documents, shutdown."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.simulator.__main__ import main
from tests.backends.simulator.conftest import start


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"replicas": []}, "replicas: Tuple should have at least 1 item"),
        ({"replicas": [{"name": "a", "model": "m", "method": "magic"}]}, "replicas.0.method: Input should be"),
        ({"replicas": [{"name": "a", "model": "m", "calibration": "abacus"}]}, "abacus"),
        ({"replicas": [{"name": "a", "model": "m", "method": "eagle3"}]}, "num_speculative_tokens"),
        ("{", "Invalid JSON"),
    ],
)
def test_an_invalid_document_is_reported(
    document: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "simulator.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    monkeypatch.setattr(sys, "argv", ["simulator", str(path)])
    assert main() == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_a_taken_port_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "simulator.json"
    monkeypatch.setattr(sys, "argv", ["simulator", str(path)])
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        path.write_text(json.dumps({"replicas": [{"name": "a", "model": "m", "port": taken.getsockname()[1]}]}))
        assert main() == 1
    assert "cannot listen" in capsys.readouterr().err


@pytest.mark.slow
def test_it_exits_cleanly_while_streaming() -> None:
    running = start({"name": "a", "time_scale": 5.0})
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{running.urls['a']}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        running.process.terminate()
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            for _ in lines:
                pass
    assert running.process.wait(60) == 0
