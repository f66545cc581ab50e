"""`gateway tune` on the command line: rules, gains and exit statuses."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
import yaml
from typer.testing import CliRunner

from gateway.cli.app import app
from lab.trace import TraceRecord, write_trace
from policies.rules.policy import ThresholdSettings
from tests.support.paths import DATA

MOONCAKE = DATA / "mooncake_synthetic_trace.jsonl"
POOL = """\
models:
  llama:
    policy:
      name: thresholds
      seed: 7
      rules: [{name: copies, when: {overlap: ">= 0.9"}, prefer: [suffix]}, {name: rest, prefer: [eagle3]}]
    backends:
      tree: {method: suffix, simulate: {calibration: llama-3.1-8b-h100}}
      head:
        method: eagle3
        simulate: {calibration: llama-3.1-8b-h100}
        speculative_config: {num_speculative_tokens: 3}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pool whose rule requires too much overlap, and a trace in which requests with overlap above 0.5 are copied."""
    folder = tmp_path_factory.mktemp("tune")
    pool, trace = folder / "pool.yaml", folder / "trace.jsonl"
    pool.write_text(POOL)
    overlaps = [n * 37 % 100 / 100 for n in range(150)]
    write_trace(
        trace,
        [
            TraceRecord(
                arrived_at=0.5 * n, temperature=0.0, prompt_tokens=200, output_tokens=100, template="0badcafe",
                overlap=overlap, acceptance={"suffix": 6.0, "eagle3": 1.4} if overlap > 0.5 else {"eagle3": 3.0},
            )
            for n, overlap in enumerate(overlaps)
        ],
    )  # fmt: skip
    return pool, trace


def run(command: str, *arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [command, *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_tuned_rules_are_better_on_the_held_out_part(files: tuple[Path, Path], tmp_path: Path) -> None:
    pool, trace = files
    out, figures = tmp_path / "rules.yaml", tmp_path / "figures.json"
    code, printed, _ = run("tune", trace, "--config", pool, "--out", out, "--trials", 15, "--json", figures)
    assert code == 0
    assert "15 trials on the first 90 requests, validated on the other 60." in printed
    text = out.read_text()
    assert printed.startswith("Held out, mean time to finish, s: tuned ")
    for line in printed.splitlines()[:2]:
        assert f"# {line}" in text
    document = orjson.loads(figures.read_bytes())
    assert not document["kept_present"]
    scores = {name: one["score"] for name, one in document["held_out"].items()}
    assert set(scores) == {"tuned", "present", "least_loaded"}
    assert scores["tuned"] < scores["present"]
    settings = yaml.safe_load(text)["policy"]
    assert settings.pop("name") == "thresholds"
    made = ThresholdSettings.model_validate(settings)
    assert (made.seed, [rule.name for rule in made.rules]) == (7, ["copies", "rest"])

    replayed = tmp_path / "replayed.json"
    options = ("--policy", out, "--policy", "thresholds", "--json", replayed)
    assert run("replay", trace, "--config", pool, *options)[0] == 0
    by_policy = orjson.loads(replayed.read_bytes())["policies"]
    assert by_policy["rules"]["e2e_s"]["mean"] < by_policy["thresholds"]["e2e_s"]["mean"]


def test_without_a_gain_the_present_rules_are_kept(files: tuple[Path, Path], tmp_path: Path) -> None:
    pool, trace = files
    out = tmp_path / "rules.yaml"
    only = "{name: thresholds, rules: [{name: all, prefer: [eagle3]}], spill: {slack: 500}}"
    given = (trace, "--config", pool, "--out", out, "--policy", only, "--trials", 3, "--rate", 0.05)
    code, printed, _ = run("tune", *given, "--objective", "goodput", "--slo", "e2e=60")
    assert code == 0
    assert "No gain: these are the present rules, unchanged." in printed
    assert "# No gain" in out.read_text()
    assert yaml.safe_load(out.read_text())["policy"]["spill"] == {"slack": 500.0, "ratio": 1.25}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--objective", "median"], "--objective median: unknown; the objectives are mean, p99, goodput"),
        (["--objective", "goodput"], "--objective goodput needs bounds: --slo"),
        (["--policy", "learned"], "--policy learned: only rules can be tuned"),
        (["--part", "1"], "the trace has 30 requests; --part 1 leaves none"),
        (["--out", "/nowhere/rules.yaml", "--trials", "1"], "/nowhere/rules.yaml"),
    ],
)
def test_wrong_input_is_reported_and_exits_2(
    files: tuple[Path, Path], tmp_path: Path, options: list[str], message: str
) -> None:
    given = (MOONCAKE, "--config", files[0], "--out", tmp_path / "rules.yaml")
    code, printed, error = run("tune", *given, *options)
    assert (code, printed) == (2, "")
    assert message in error
