"""`gateway evaluate` on the command line: output, files, refusals and exit statuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from benchmarks.routing import offpolicy as simulated
from gateway.cli.app import app
from lab.trace import TraceRecord, write_trace
from tests.support.report import ReportPage

POOL = """\
models:
  m:
    policy: {name: static, backend: head}
    backends:
      plain: {method: baseline, url: "http://127.0.0.1:9"}
      lookup: {method: ngram, url: "http://127.0.0.1:10", speculative_config: {num_speculative_tokens: 5}}
      tree: {method: suffix, url: "http://127.0.0.1:11"}
      head: {method: eagle3, url: "http://127.0.0.1:12", weight: 3, speculative_config: {num_speculative_tokens: 3}}
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of 600 requests with randomly chosen backends, and 50 of another model."""
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    records = [
        replace(record, arrived_at=float(number)) for number, record in enumerate(simulated.surface_log(1, 650, 1.0))
    ]
    write_trace(
        path, [replace(record, model="other") if place % 13 == 1 else record for place, record in enumerate(records)]
    )
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
def test_each_policy_gets_a_table_and_all_figures_are_written(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    policies = ("--policy", "random", "--policy", "{name: static, backend: tree}")
    code, printed, _ = run(log, *policies, "--json", out, "--report", tmp_path / "page.html")
    assert code == 0
    assert printed.startswith("600 requests\n")
    assert "\nrandom: effective sample size 600" in printed
    assert "\nstatic: " in printed
    assert printed.count("e2e_s mean") == printed.count("tpot_s mean") == 2
    assert "that requests slow each other" in printed
    document = orjson.loads(out.read_bytes())
    assert document["requests"] == 600
    own = document["policies"]["random"]
    assert own["refused"] is None
    assert own["effective_sample_size"] == pytest.approx(600)
    assert own["e2e_s"]["ips"]["mean"]["value"] == pytest.approx(own["e2e_s"]["logged"]["mean"])
    other = document["policies"]["static"]
    assert other["shares"]["tree"] == 1.0
    for estimator in ("ips", "snips", "dr"):
        seen = other["e2e_s"][estimator]["mean"]
        assert seen["low"] < seen["value"] < seen["high"]
    assert set(other["e2e_s"]["quantiles"]) == {"p50"}
    page = ReportPage((tmp_path / "page.html").read_text("utf-8"))
    assert page.headings[0] == "Against the log"
    change = other["e2e_s"]["dr"]["to_log"]["value"]
    assert page.tables["Differences from the log, %"][2][0] == "static"
    assert f"{100 * (change - 1):+.1f} (" in page.tables["Differences from the log, %"][2][2]
    assert page.tables["Choices of static"][1][1:] == ["100%" if name == "tree" else "0%" for name in other["shares"]]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures(log: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        assert run(log, "--policy", "thresholds", "--seed", 3, "--limit", 500, "--json", tmp_path / name)[0] == 0
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


@pytest.mark.slow
def test_the_pool_gives_weights_and_a_default_policy(log: Path, tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text(POOL)
    out = tmp_path / "figures.json"
    assert run(log, "--config", pool, "--json", out)[0] == 0
    assert orjson.loads(out.read_bytes())["policies"]["static"]["shares"]["head"] == 1.0
    assert run(log, "--config", pool, "--policy", "random", "--json", out)[0] == 0
    assert orjson.loads(out.read_bytes())["policies"]["random"]["shares"]["head"] == pytest.approx(0.5)


@pytest.mark.slow
def test_policies_come_from_files_and_duplicate_names_are_numbered(log: Path, tmp_path: Path) -> None:
    rules = tmp_path / "mine.yaml"
    rules.write_text("policy:\n  name: thresholds\n  rules: [{name: all, when: {}, prefer: [suffix]}]\n")
    out = tmp_path / "figures.json"
    given = [rules, "{name: static, backend: tree}", "{name: static, method: suffix}"]
    options = [word for policy in given for word in ("--policy", policy)]
    assert run(log, *options, "--json", out)[0] == 0
    by_policy = orjson.loads(out.read_bytes())["policies"]
    assert list(by_policy) == ["mine", "static", "static (2)"]
    assert {figures["shares"]["tree"] for figures in by_policy.values()} == {1.0}


def test_a_policy_that_cannot_be_evaluated_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write_trace(path, list(simulated.surface_log(1, 300, 0.0)))
    code, printed, _ = run(path, "--policy", "{name: static, backend: tree}")
    assert code == 1
    assert "Cannot be evaluated on this log: the log's policy would never make 100% of its choices" in printed
    assert "e2e_s mean" not in printed
    given = (
        path,
        "--policy",
        "{name: static, backend: tree}",
        "--policy",
        "random",
        "--report",
        tmp_path / "page.html",
    )
    assert run(*given)[0] == 1
    page = ReportPage((tmp_path / "page.html").read_text("utf-8"))
    assert "static cannot be evaluated on this log: the log's policy would never make 100%" in page.text
    assert "Against the log" not in page.headings


def test_only_requests_of_the_model_are_used(log: Path) -> None:
    code, printed, _ = run(log, "--policy", "random", "--model", "other")
    assert printed.startswith("50 requests")
    assert code == 1  # 50 requests are too few


@pytest.mark.slow
def test_a_policy_starts_from_the_learned_state_of_a_replay(log: Path, tmp_path: Path) -> None:
    """In the replay all drafts of `head` are accepted and no others, unlike in the calibration."""
    pool, trace, state, out = (tmp_path / name for name in ("pool.yaml", "trace.jsonl", "state.json", "figures.json"))
    pool.write_text(POOL)
    acceptance = {"ngram": 1.0, "suffix": 1.0, "eagle3": 4.0}
    write_trace(
        trace,
        [TraceRecord(arrived_at=n / 4, prompt_tokens=60, output_tokens=80, acceptance=acceptance) for n in range(300)],
    )
    kept = [trace, "--config", pool, "--policy", "learned", "--state", state]
    assert CliRunner().invoke(app, ["replay", *map(str, kept)]).exit_code == 0
    given = (log, "--config", pool, "--policy", "learned", "--json", out)
    shares = []
    for more in ((), ("--state", state)):
        assert run(*given, *more)[0] in (0, 1)
        shares.append(orjson.loads(out.read_bytes())["policies"]["learned"]["shares"])
    assert shares[1]["head"] > shares[0]["head"] + 0.2


@pytest.mark.parametrize("written", [None, "{}", '{"learned": {"mine": []}}'])
def test_a_state_without_the_policy_is_refused(log: Path, tmp_path: Path, written: str | None) -> None:
    state = tmp_path / "state.json"
    if written is not None:
        state.write_text(written)
    code, printed, error = run(log, "--policy", "learned", "--state", state)
    assert (code, printed) == (2, "")
    messages = {
        None: "cannot read the file: No such file",
        "{}": "not a file written by `gateway replay --state`",
        '{"learned": {"mine": []}}': "has nothing learned by learned; known here: mine",
    }
    assert messages[written] in error
    state.write_text('{"learned": {}}')
    assert "none of the policies learns" in run(log, "--policy", "random", "--state", state)[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "rondom"], "--policy rondom: name: no such policy; did you mean 'random'?"),
        (["--policy", "{name: static}"], "static takes either `backend: NAME` or `method: METHOD`"),
        (["--policy", "nowhere.yaml"], "--policy nowhere.yaml: cannot read the file"),
        (["--policy", "{name: [static}"], "not YAML"),
        ([], "--policy: name a policy, or give --config"),
        (["--policy", "random", "--model", "none"], "no record of the log has a choice"),
        (["--policy", "random", "--format", "cvs"], "unknown format 'cvs'"),
        (["--policy", "random", "--config", "nowhere.yaml"], "nowhere.yaml:1:1: cannot read it"),
    ],
)
def test_wrong_input_is_reported_and_exits_2(log: Path, options: list[str], message: str) -> None:
    code, printed, error = run(log, *options)
    assert (code, printed) == (2, "")
    assert message in error


@pytest.mark.slow
def test_broken_lines_are_reported_and_counted_or_refused(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = log.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:300], b"{broken", *lines[300:]]))
    code, printed, error = run(path, "--policy", "random")
    assert code == 0
    assert "left out: 1 broken lines" in printed
    assert "log.jsonl:301" in error
    code, _, error = run(path, "--policy", "random", "--strict")
    assert code == 2
    assert "log.jsonl:301" in error
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert run(tmp_path / "empty.jsonl", "--policy", "random")[0] == 2
