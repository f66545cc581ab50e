"""What each part of `learned` brings: `python -m benchmarks.routing.ablation FOLDER [--agents FOLDER] --json FILE`.

FOLDER is that of `benchmarks.routing`. Each row is `learned` with one part switched off, or another policy; each column
a scene (`benchmarks.routing.scenes`). Entries are the mean time to finish over that of `learned` on the same arrivals,
as a percentage more, with the 95% interval of Student's t over paired runs; = where every choice was the same; in
brackets the number of runs where it is smaller. Parts that bring less than half a percent in every scene that they
touch have a ✗. Where prompts are new, each is sent once: those of the tuning part as warm-up, then those of the
reported part.

A run of one scene adds its figures to FILE, so that the table can be made in pieces; without `--runs` it only prints.
Regressions begin with 3,000 requests of the tuning part at half load, routed at random; in the scene `warm` every
policy that learns has routed them itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.routing.ablation.parts import PARTS, without
from benchmarks.routing.ablation.regressions import Bandit, Model, PerReplica, Seen, bayesian_ridge, boosted_trees
from benchmarks.routing.learning import Learning, learning_of, teach
from benchmarks.routing.runs import of_runs
from benchmarks.routing.scenes import SCENES, Stage, break_later
from lab.simulation.simulate import replay
from policies.balancing.least_loaded import LeastLoaded
from policies.balancing.lmetric import LMetric
from policies.learned.policy import Learned
from policies.load_policy import LoadSettings
from policies.policy import Policy
from policies.rules.policy import Thresholds, ThresholdSettings

Figures = dict[str, dict[str, dict[str, list[float]]]]
"""Mean and 99th percentile in seconds, by scene, row and number of the run."""

WORTH = 0.005
"""What a part has to bring in some scene."""

REGRESSIONS: dict[str, Callable[[], Model]] = {
    "`BayesianRidge` for each replica": bayesian_ridge,
    "`HistGradientBoostingRegressor`": boosted_trees,
    "linear contextual bandit": Bandit,
}
OTHERS: dict[str, Callable[[int], Policy | None]] = {
    "least_loaded": lambda seed: LeastLoaded(LoadSettings(seed=seed)),
    "lmetric": lambda seed: LMetric(LoadSettings(seed=seed)),
    "thresholds": lambda seed: Thresholds(ThresholdSettings(seed=seed)),
    "oracle": lambda seed: None,
}
ROWS = ("learned", *PARTS, *OTHERS, *REGRESSIONS)


def makers(begin: Callable[[], list[Seen]], seed: int) -> dict[str, Callable[[], Policy | None]]:
    """Return a function per row that makes its policy."""
    made: dict[str, Callable[[], Policy | None]] = {"learned": partial(without, seed)}
    made |= {name: partial(without, seed, name) for name in PARTS}
    made |= {name: partial(make, seed) for name, make in OTHERS.items()}
    return made | {name: (lambda name=name: PerReplica(name, REGRESSIONS[name], begin(), seed)) for name in REGRESSIONS}


def beginning(stage: Stage, scene: str) -> list[Seen]:
    """Return what random choices show of the tuning part."""
    run, policy = stage.training(scene), PerReplica("random", Bandit, [], 99)
    replay(run.specs, run.requests, policy, seed=run.seed)
    return policy.seen


def trained(stage: Stage, scene: str, policy: Policy | None) -> Learning:
    """Return what a policy learns from the tuning part."""
    assert isinstance(policy, Learned)
    run = stage.training(scene)
    replay(run.specs, run.requests, policy, seed=run.seed)
    return learning_of(policy)


def play(stage: Stage, scene: str, numbers: range, rows: list[str], figures: Figures) -> None:
    """Add the figures of some runs of a scene."""
    seen: list[Seen] = []
    learned: dict[str, Learning] = {}

    def begin() -> list[Seen]:
        if not seen:
            seen.extend(beginning(stage, scene))
        return seen

    for number in numbers:
        run = stage.run(scene, number)
        for row, make in makers(begin, number).items():
            of_row = figures.setdefault(scene, {}).setdefault(row, {})
            if row not in rows or str(number) in of_row or _is_impossible(scene, row):
                continue
            policy = make()
            if SCENES[scene].kind == "warm" and isinstance(policy, Learned):
                if row not in learned:
                    learned[row] = trained(stage, scene, make())
                teach(policy, learned[row])
            if policy is not None:
                break_later(policy, run)
            played = replay(run.specs, run.requests, policy, seed=run.seed, warmup=run.warmup)
            of_row[str(number)] = [float(played.e2e_s.mean()), float(np.percentile(played.e2e_s, 99))]
        print(f"\r{scene} {number}", end="", file=sys.stderr, flush=True)


def _is_impossible(scene: str, row: str) -> bool:
    """Return whether a row has no meaning: the oracle cannot know the fault, and there are few sessions."""
    kind = SCENES[scene].kind
    return (kind == "slow" and row == "oracle") or (kind == "agents" and row in REGRESSIONS)


def over(of_row: Mapping[str, list[float]], of_learned: Mapping[str, list[float]], which: int) -> tuple[float, float]:
    """Return how much more a row takes than `learned`, and half the width of the 95% interval over runs."""
    ratios = [of_row[run][which] / of_learned[run][which] for run in of_row if run in of_learned]
    if len(ratios) < 2:
        return math.nan, math.nan
    value, half = of_runs(ratios)
    return value - 1.0, half


def report(figures: Figures, which: int) -> None:
    """Print the table."""
    scenes = [scene for scene in SCENES if scene in figures]
    counts = [len(figures[scene]["learned"]) for scene in scenes]
    print("| without | " + " | ".join(SCENES[scene].what for scene in scenes) + " |")
    print("|---" * (1 + len(scenes)) + "|")
    print("| runs | " + " | ".join(map(str, counts)) + " |")
    for row in ROWS[1:]:
        cells, seen = [], []
        for scene in scenes:
            more, half = over(figures[scene].get(row, {}), figures[scene]["learned"], which)
            count = len(figures[scene].get(row, {}))
            fewer = f" ({count})" if count < len(figures[scene]["learned"]) else ""
            changed = f"{100 * more:+.1f} ±{100 * half:.1f}" if more or half else "="
            cells.append("" if math.isnan(more) else changed + fewer)
            seen += [more] if more or half else []
        mark = " ✗" if row in PARTS and seen and max(seen) < WORTH else ""
        print(f"| {row}{mark} | {' | '.join(cells)} |")


def main() -> None:
    """Play some runs, and print the table of all that were played."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="folder of the recordings")
    parser.add_argument("--agents", type=Path, help="folder of agents' sessions")
    parser.add_argument("--scene", action="append", choices=list(SCENES), help="only this scene; may be repeated")
    parser.add_argument("--row", action="append", choices=list(ROWS), help="only this row and `learned`")
    parser.add_argument("--runs", type=int, default=0, help="runs of each scene")
    parser.add_argument("--json", type=Path, required=True, help="file of the figures, which is added to")
    parser.add_argument("--p99", action="store_true", help="print 99th percentiles instead of means")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    figures: Figures = json.loads(given.json.read_text(encoding="utf-8")) if given.json.exists() else {}
    if given.runs:
        rows = ["learned", *(given.row or ROWS)]
        with ExitStack() as files:
            stage = Stage.of(given.folder, given.agents, files)
            for scene in given.scene or SCENES:
                play(stage, scene, range(given.runs), rows, figures)
                given.json.write_text(json.dumps(figures), encoding="utf-8")
    report(figures, int(given.p99))


if __name__ == "__main__":
    main()
