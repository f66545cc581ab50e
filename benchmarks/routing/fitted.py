"""Whether policies do better on requests that their constants saw: `python -m benchmarks.routing.fitted FOLDER`.

The prior of `learned` was fitted to every second row of each file of FOLDER, and the default rules were tuned on every
second row of `derived_per_request.csv.gz`, before the recordings were split by a hash of their ids. So about half of
the reported requests were among them. Prints the mean time of those and of the others over that under `least_loaded` in
the same runs: geometric means over all mixes and loads of the scene `new` of `benchmarks.routing.scenes`.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.routing.ground import WORKLOADS
from benchmarks.routing.parts import without
from benchmarks.routing.scenes import Stage
from lab.replay.request import ReplayRequest
from lab.replay.simulate import replay
from policies.balancing.least_loaded import LeastLoaded
from policies.load_policy import LoadSettings
from policies.rules.policy import Thresholds, ThresholdSettings

Prompt = tuple[int, ...]


def seen(folder: Path) -> dict[str, set[Prompt]]:
    """Return the prompts of the requests that the constants of each policy saw."""
    with gzip.open(folder / "derived_per_request.csv.gz", "rt", encoding="utf-8", newline="") as table:
        tuned = {(row["dataset"], row["id"]) for row in list(csv.DictReader(table))[::2]}
    rules, prior = set(), set()
    for dataset in WORKLOADS:
        with gzip.open(folder / f"combined_{dataset}.jsonl.gz", "rt", encoding="utf-8") as lines:
            for number, row in enumerate(map(json.loads, lines)):
                prompt = tuple(row["prompt_token_ids"])
                rules |= {prompt} if (dataset, row["id"]) in tuned else set()
                prior |= set() if number % 2 else {prompt}
    return {"thresholds": rules, "learned": prior, "learned, flat prior": prior}


def prompt_of(request: ReplayRequest) -> Prompt:
    """Return the tokens of a request's prompt."""
    assert request.text is not None
    return tuple(request.text.prompt)


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the recordings")
    parser.add_argument("--runs", type=int, default=40)
    given = parser.parse_args()
    stage, known = Stage.of(given.folder, None, ExitStack()), seen(given.folder)
    logs = defaultdict(list)
    for number in range(given.runs):
        run = stage.run("new", number)
        prompts = [prompt_of(request) for request in run.requests[run.warmup :]]
        policies = {
            "least_loaded": LeastLoaded(LoadSettings(seed=number)),
            "thresholds": Thresholds(ThresholdSettings(seed=number)),
            "learned": without(number),
            "learned, flat prior": without(number, "prior of acceptance"),
        }
        times = {
            name: replay(run.specs, run.requests, policy, seed=number, warmup=run.warmup).e2e_s
            for name, policy in policies.items()
        }
        for name, of_policy in known.items():
            inside = np.array([prompt in of_policy for prompt in prompts])
            for which in (inside, ~inside):
                ratio = times[name][which].mean() / times["least_loaded"][which].mean()
                logs[name, bool(which is inside)].append(math.log(ratio))
    print("| policy | requests that its constants saw | others |\n|---|---|---|")
    for name in known:
        print(f"| {name} | {math.exp(fmean(logs[name, True])):.3f} | {math.exp(fmean(logs[name, False])):.3f} |")


if __name__ == "__main__":
    main()
