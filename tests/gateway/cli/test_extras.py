"""Commands whose optional dependencies are missing say which extra to install, and do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import extras
from gateway.cli.app import app


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    found = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name in request.param else found(name))


@pytest.mark.parametrize("without", [{"numba"}, {"optuna"}], indirect=True)
@pytest.mark.usefixtures("without")
def test_a_command_names_its_extra_before_it_reads_anything(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    missing = request.node.callspec.params["without"]
    pool, trace, out = str(tmp_path / "no.yaml"), str(tmp_path / "no.jsonl"), str(tmp_path / "out.yaml")
    commands = {
        "numba": ["replay", trace, "--config", pool],
        "optuna": ["tune", trace, "--config", pool, "--out", out],
    }
    (module,) = missing
    result = CliRunner().invoke(app, commands[module])
    assert result.exit_code == 2
    assert (
        f"gateway {commands[module][0]}: needs {module}: pip install '.[lab]' in a checkout (deploy/README.md#install)"
        in result.stderr
    )


@pytest.mark.parametrize("without", [{"numba"}], indirect=True)
@pytest.mark.usefixtures("without")
def test_simulated_replicas_name_their_extra_before_anything_starts() -> None:
    result = CliRunner().invoke(app, ["--config", "config/pool.yaml"])
    assert result.exit_code == 2
    assert (
        result.stderr == "gateway: needs numba: pip install '.[simulator]' in a checkout (deploy/README.md#install)\n"
    )


def test_an_export_names_its_extra_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = extras.find_spec

    def find_spec(name: str) -> object:
        if name == "opentelemetry.sdk":
            raise ModuleNotFoundError(name)
        return found(name)

    monkeypatch.setattr(extras, "find_spec", find_spec)
    pool = tmp_path / "pool.yaml"
    backend = "{method: baseline, url: 'http://127.0.0.1:9'}"
    pool.write_text(
        f"models: {{m: {{policy: {{name: random}}, backends: {{a: {backend}}}}}}}\ntelemetry: {{otlp: {{}}}}\n"
    )
    result = CliRunner().invoke(app, ["--config", str(pool)])
    assert result.exit_code == 2
    assert (
        result.stderr
        == "gateway: needs opentelemetry.sdk: pip install '.[otel]' in a checkout (deploy/README.md#install)\n"
    )
