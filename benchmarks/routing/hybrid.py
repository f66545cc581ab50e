"""An engine that drafts by suffix and by head in one step: `python -m benchmarks.routing.hybrid FOLDER [--seeds N]`.

FOLDER is that of `benchmarks.routing`. Where the suffix tree has a draft of `LEAST` tokens or more, a step verifies it,
elsewhere EAGLE-3's with k=3, whose passes run in every step. Four such replicas are compared with four of each method
and with two of each, on the same arrivals: the mean time over that of two of each under `learned`. What the GPU waits
for a suffix lookup is not known: rows have both ends of its range, on suffix and hybrid replicas alike. `LEAST` is the
best of 2, 4 and 8 on the tuning part.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from backends.calibration.load import load_calibration
from backends.drafting.script import Script
from backends.speculation import Method
from benchmarks.routing.ground import _H100, Ground, OnGround, Task, bare, once, timed
from benchmarks.routing.runs import of_runs
from benchmarks.table import head, row
from lab.parallel import all_cores
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import ReplayRequest
from lab.simulation.simulate import replay

LEAST: Final = 4
WAITS_S: Final = 4e-5, 3e-3
LOADS: Final = 0.02, 0.25, 0.5, 0.75
K, DEPTH = 3, 24
_E: Final = (Method.EAGLE3, {"num_speculative_tokens": K})
_S: Final = (Method.SUFFIX, {"num_speculative_tokens": DEPTH})
_HYBRID: Final = (Method.MTP, {"num_speculative_tokens": DEPTH})
"""What stands for the hybrid: any method whose steps are given with the requests."""
FLEETS: Final[dict[str, tuple[str, tuple[tuple[Method, dict[str, int]], ...]]]] = {
    "2 suffix, 2 EAGLE-3, `learned`": ("learned", (_S, _S, _E, _E)),
    "2 suffix, 2 EAGLE-3, `least_loaded`": ("least_loaded", (_S, _S, _E, _E)),
    "4 suffix": ("least_loaded", (_S,) * 4),
    "4 EAGLE-3": ("least_loaded", (_E,) * 4),
    "4 hybrid": ("least_loaded", (_HYBRID,) * 4),
}


def calibration(folder: Path, wait_s: float) -> str:
    """Write the calibration of the H100 with a hybrid engine, and return its path."""
    known = load_calibration(_H100)
    document: dict[str, Any] = known.model_dump(mode="json", exclude={"name", "methods_from"}, exclude_none=True)
    methods = document["methods"]
    lookup, drafting = methods["suffix"]["drafting"], methods["eagle3"]["drafting"]
    lookup |= {"verify_share": 0.0, "base_s": wait_s}
    passes = K - 1 + drafting["first_passes"]
    scaled = {name: passes * drafting[name] for name in ("per_pass_s", "per_request_s", "per_context_token_s")}
    hybrid = {**drafting, **scaled, "first_passes": 1.0, "base_s": wait_s, "parallel": True}
    hybrid["per_request_s"] += lookup["per_request_s"]
    methods[Method.MTP.value] = {**methods["eagle3"], "drafting": hybrid}
    path = folder / f"hybrid-{wait_s}.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


def with_hybrid(request: ReplayRequest, least: int) -> ReplayRequest:
    """Return a request that a hybrid replica has steps for."""
    suffix, eagle = request.script(_S[0], DEPTH, _S[1]), request.script(_E[0], K, _E[1])
    assert suffix is not None
    assert eagle is not None
    by_suffix = suffix.drafted >= least
    emitted = np.where(by_suffix, suffix.emitted, eagle.emitted).astype(np.int32)
    drafted = np.where(by_suffix, suffix.drafted, eagle.drafted).astype(np.int32)
    script = Script(request.prompt_tokens, request.output_tokens, emitted, drafted, request.prefix_blocks)
    return replace(request, _scripts={**request._scripts, (_HYBRID[0].value, DEPTH, ()): script})


def fleet(name: str, path: str) -> list[ReplicaSpec]:
    """Return the replicas of a fleet."""
    return [ReplicaSpec(f"{method}-{n}", method, config, path) for n, (method, config) in enumerate(FLEETS[name][1])]


def means(folder: Path, least: int, ground: Ground, task: tuple[Task, float, bool]) -> dict[str, float]:
    """Return the mean seconds of each fleet on the same arrivals."""
    run, wait_s, is_tuning = task
    rng = Random(run.seed)
    requests = once(ground.others if is_tuning else ground.requests, run.mix, rng)
    coming = [with_hybrid(one, least) for one in timed(ground, run, requests)]
    path = calibration(folder, wait_s)
    return {
        name: float(replay(fleet(name, path), coming, bare(policy, run.seed)).e2e_s.mean())
        for name, (policy, _) in FLEETS.items()
        if not is_tuning or name == "4 hybrid"
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the recordings")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--least", type=int, default=LEAST)
    parser.add_argument("--tune", action="store_true", help="print the hybrid's time by `least` on the tuning part")
    given = parser.parse_args(arguments)
    runs = [
        (Task("2s/2e", "even", load, "poisson", seed), wait_s, given.tune)
        for wait_s, load, seed in product(WAITS_S, LOADS, range(given.seeds))
    ]
    with tempfile.TemporaryDirectory() as folder:
        for least in (2, 4, 8) if given.tune else (given.least,):
            play = OnGround(partial(means, Path(folder), least), given.folder)
            with all_cores(play, label="playing") as run_all:
                played = list(zip(runs, run_all(runs), strict=True))
            if given.tune:
                print(
                    least,
                    [
                        round(float(np.mean([one["4 hybrid"] for (_, w, _), one in played if w == wait_s])), 3)
                        for wait_s in WAITS_S
                    ],
                )
                continue
            print(head("fleet", "waits ms", "mean", *(f"{load:.0%}" for load in LOADS)))
            for wait_s, name in product(WAITS_S, FLEETS):
                ratios = {
                    load: [
                        one[name] / one["2 suffix, 2 EAGLE-3, `learned`"]
                        for (run, waits, _), one in played
                        if waits == wait_s and run.load == load
                    ]
                    for load in LOADS
                }
                mean, error = of_runs([ratio for each in ratios.values() for ratio in each])
                cells = [f"{of_runs(each)[0]:.3f}" for each in ratios.values()]
                print(row(name, f"{1e3 * wait_s:g}", f"{mean:.3f} ±{error:.3f}", *cells))


if __name__ == "__main__":
    main()
