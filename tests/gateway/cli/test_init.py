"""`gateway init` writes a pool file that can be served, and never over another file."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.app import app
from gateway.cli.init import _is_private
from gateway.config.load import load_pool
from tests.support.paths import ROOT
from tests.support.upstream import upstreams_in_thread


def test_it_writes_the_default_pool_where_the_gateway_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["init"])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        "Wrote config/pool.yaml: five simulated replicas. Serve them with `gateway --config config/pool.yaml`.\n"
    )
    written, committed = tmp_path / "config/pool.yaml", ROOT / "config/pool.yaml"
    assert load_pool(written) == load_pool(committed)
    assert "schema.json" not in written.read_text()  # which an editor would look for beside it
    assert CliRunner().invoke(app, ["check"]).exit_code == 0


@pytest.mark.parametrize(
    ("name", "why"), [("own.yaml", "it exists"), ("own.yaml/pool.yaml", "{folder}/own.yaml: File exists")]
)
def test_it_writes_no_file_twice_and_says_why_it_cannot_write(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "own.yaml").write_text("mine")
    result = CliRunner().invoke(app, ["--config", str(tmp_path / name), "init"])
    said = f"cannot write {tmp_path / name}: {why.format(folder=tmp_path)}; give another name with --config\n"
    assert (result.exit_code, result.stderr) == (2, f"gateway init: {said}")
    assert (tmp_path / "own.yaml").read_text() == "mine"


KEPT = """
model_list:
  - {{model_name: m, litellm_params: {{model: m, api_base: "{a}/v1", api_key: sk-secret, rpm: 5}}}}
  - {{model_name: gpt-4o, litellm_params: {{model: m, api_base: "{b}"}}}}
  - {{model_name: m, litellm_params: {{model: m, api_base: "http://127.0.0.1:9"}}}}
"""


def test_it_takes_the_engines_that_a_file_names(tmp_path: Path) -> None:
    pool, theirs = tmp_path / "pool.yaml", tmp_path / "theirs"
    with upstreams_in_thread("ab", "m") as (a, b):
        theirs.write_text(KEPT.format(a=a.url, b=b.url))
        result = CliRunner().invoke(app, ["init", str(theirs), "--config", str(pool)])
        assert result.exit_code == 0, result.stderr
        assert "127.0.0.1:9 (theirs, line 5): refuses connections" in result.stdout
        assert {each.url for each in load_pool(pool).models["m"].backends.values()} == {a.url, b.url}
        text = " ".join(line.strip("# ") for line in pool.read_text().splitlines())
        kept = "model_name gpt-4o (theirs, line 4), api_key (theirs, line 3), rpm (theirs, line 3)"
        assert f"Not taken over: {kept}." in text
        assert "Left out (theirs, line 5): refuses connections" in text
        assert "sk-secret" not in text + result.output
        pool.unlink()
        flags = ["--static-backends", f"{a.url},{b.url}", "--static-models", "m,m"]
        misspelt = CliRunner().invoke(app, ["init", a.url, "--confg", str(pool)])
        assert (misspelt.exit_code, "No such option: --confg" in misspelt.stderr) == (2, True)
        assert CliRunner().invoke(app, ["init", "--config", str(pool), "--", *flags]).exit_code == 0
        assert len(load_pool(pool).models["m"].backends) == 2
        pool.unlink()
        latin = f"proxy_pass {a.url}; # caf\xe9".encode("latin-1")
        result = CliRunner().invoke(app, ["init", "-", "--config", str(pool)], input=latin)
        assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "0 addresses are named; expected 1 to 256"),
        ("--worker-urls $NO_SUCH", "theirs.sh, line 1: NO_SUCH is not set here"),
        ("--prefill http://a:1", "theirs.sh, line 1: prefill tells prefill and decode apart"),
        (None, "theirs.sh: No such file"),
    ],
)
def test_it_says_why_a_file_is_of_no_use(tmp_path: Path, text: str | None, message: str) -> None:
    theirs = tmp_path / "theirs.sh"
    if text is not None:
        theirs.write_text(text)
    result = CliRunner().invoke(app, ["init", str(theirs), "--config", str(tmp_path / "pool.yaml")])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("key", ["geheim-schlüssel", "sk-secret\nx"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(tmp_path: Path, key: str) -> None:
    arguments = ["init", "http://127.0.0.1:9", "--config", str(tmp_path / "pool.yaml")]
    result = CliRunner().invoke(app, arguments, env={"VLLM_API_KEY": key})
    assert result.exit_code == 2
    assert "VLLM_API_KEY has a line break, a space at an end or a character beyond ASCII" in result.stderr
    assert "schl" not in result.output
    assert "sk-secret" not in result.output


def test_the_key_of_the_engines_goes_to_no_public_address_of_a_file() -> None:
    for url, is_private in (("127.0.0.1", True), ("10.0.0.1", True), ("[::1]", True), ("8.8.8.8", False)):
        assert _is_private(f"http://{url}:8000") is is_private
