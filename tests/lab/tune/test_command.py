"""`gateway tune` on the command line: rules, gains and exit statuses."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml

from lab.simulation.simulate import Replayed
from lab.simulation.table import request_table
from lab.trace.read import read_trace
from lab.trace.record import TraceRecord
from lab.trace.write import write_trace
from lab.tune.command import score, stretches
from lab.tune.options import Goal
from policies.rules.policy import ThresholdSettings
from tests.lab.invoked import figures, refused, run
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


@pytest.mark.slow
def test_the_tuned_rules_are_better_on_the_held_out_part(files: tuple[Path, Path], tmp_path: Path) -> None:
    pool, trace = files
    out = tmp_path / "rules.yaml"
    printed, document = figures("tune", tmp_path, trace, "--config", pool, "--out", out, "--trials", 15)
    assert "15 trials on the first 90 requests, validated on the other 60." in printed
    text = out.read_text()
    assert printed.splitlines()[2].startswith("Held out, mean time to finish, s: tuned ")
    for line in printed.splitlines()[2:4]:
        assert f"# {line}" in text
    assert not document["kept_present"]
    scores = {name: one["score"] for name, one in document["held_out"].items()}
    assert set(scores) == {"tuned", "present", "least_loaded"}
    assert scores["tuned"] < scores["present"]
    settings = yaml.safe_load(text)["policy"]
    assert settings.pop("name") == "thresholds"
    made = ThresholdSettings.model_validate(settings)
    assert (made.seed, [rule.name for rule in made.rules]) == (7, ["copies", "rest"])

    options = ("--policy", out, "--policy", "thresholds")
    by_policy = figures("replay", tmp_path, trace, "--config", pool, *options)[1]["policies"]
    assert by_policy["rules"]["e2e_s"]["mean"] < by_policy["thresholds"]["e2e_s"]["mean"]


def test_without_a_gain_the_present_rules_are_kept(files: tuple[Path, Path], tmp_path: Path) -> None:
    _, trace = files
    pool, out = tmp_path / "pool.yaml", tmp_path / "rules.yaml"
    rules = "      rules: [{name: all, prefer: [eagle3]}]\n      spill: {slack: 500}\n"
    pool.write_text("".join(rules if "rules:" in line else line for line in POOL.splitlines(keepends=True)))
    given = (trace, "--config", pool, "--out", out, "--trials", 3, "--rate", 0.05)
    code, printed, _ = run("tune", *given, "--objective", "goodput", "--slo", "e2e=60")
    assert code == 0
    assert "No gain: these are the present rules, unchanged." in printed
    assert "# No gain" in out.read_text()
    assert yaml.safe_load(out.read_text())["policy"] == {
        "name": "thresholds",
        "seed": 7,
        "spill": {"slack": 500.0, "ratio": 1.25},
        "rules": [{"name": "all", "prefer": ["eagle3"]}],
    }


def test_rules_that_the_pool_does_not_have_are_not_called_present(files: tuple[Path, Path], tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    pool.write_text(POOL.replace("name: thresholds", "name: round_robin").replace("      seed: 7\n", ""))
    pool.write_text("".join(line for line in pool.read_text().splitlines(keepends=True) if "rules:" not in line))
    given = (files[1], "--config", pool, "--out", tmp_path / "rules.yaml", "--trials", 1)
    printed, document = figures("tune", tmp_path, *given)
    assert list(document["held_out"]) == ["tuned", "default", "least_loaded"]
    assert "The pool's policy, round_robin, is not compared" in printed
    assert "present" not in printed


def test_scores_follow_the_goal_over_all_parts() -> None:
    def played(e2e_s: list[float], errors: int) -> Replayed:
        times, counts = np.array(e2e_s), np.arange(len(e2e_s))
        return Replayed(times, times, times, counts, counts, errors, 1.0, counts, times)

    parts = [played([1.0, 2.0], 0), played([3.0, 10.0], 4)]
    assert score(Goal.MEAN, {}, parts) == pytest.approx(4.0)
    assert score(Goal.P99, {}, parts) == pytest.approx(9.79)
    assert score(Goal.GOODPUT, {"e2e": 2.5}, parts) == pytest.approx(1 - 2 / 8)  # those not served miss it
    assert score(Goal.MEAN, {}, [played([], 3)]) == score(Goal.MEAN, {}, parts, 3) == math.inf  # too many not served


def test_a_longer_part_is_played_in_stretches_spread_evenly(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.tune.command._MOST_REQUESTS", 40)
    with request_table(read_trace([files[1]]), 0.0) as table:
        chosen = stretches(table.paced(table.arrived_at))
    assert [len(one) for one in chosen] == [4] * 10
    starts = [one[0].arrived_s / 0.5 for one in chosen]
    assert (starts[0], starts[-1]) == (0, 146)
    assert {round(after - before) for before, after in pairwise(starts)} <= {16, 17}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--objective", "median"], "'median' is not one of 'mean', 'p99', 'goodput'"),
        (["--objective", "goodput"], "--objective goodput needs bounds: --slo"),
        (["--part", "1"], "the trace has 30 requests; --part 1 leaves none"),
    ],
)
def test_wrong_input_is_reported_and_exits_2(
    files: tuple[Path, Path], tmp_path: Path, options: list[str], message: str
) -> None:
    given = (MOONCAKE, "--config", files[0], "--out", tmp_path / "rules.yaml")
    assert message in refused("tune", *given, *options)
