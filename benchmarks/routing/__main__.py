"""Compare policies: `python -m benchmarks.routing FOLDER [--azure TRACE.csv.gz] [--seeds N]`.

FOLDER holds the recordings of SpecDecode-Bench (`combined_*.jsonl.gz`, arXiv 2601.11580; Llama-3.1-8B, greedy), which
are not part of the project. Simulated replicas play the recorded steps of each request: n-gram and suffix drafting are
replayed on its text, EAGLE-3 as recorded. A policy's choices therefore determine the load that later requests meet.
Answers are cut at 1,024 tokens, because a few that repeat themselves without end would dominate every average. Step
times of other targets come from their calibrations; acceptance always comes from these recordings.

The recordings are split by a hash of their ids (`draw`). One part is reported; the warm policy, and the rules that its
table says (`distilled`), learned from the other (`--tune` swaps the two). Each recorded prompt is sent once in a run:
those of the other part are the warm-up and do not count. Each table entry is the mean over seeds of a ratio to
`least_loaded` on the same arrivals. A random third of the requests have an SLO, the median TPOT of `least_loaded` in
that run; "SLO kept" is the share of them that meet it.
"""

from __future__ import annotations

from itertools import product

from benchmarks.routing.ground import LOADS, MIXES, OnGround, Task, options
from benchmarks.routing.play import play
from benchmarks.routing.report import report
from lab.parallel import all_cores

PLAYED = "b/n/s/e", "2s/2e"


def main() -> None:
    """Play all runs on all cores, and print the report."""
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    tasks = [
        Task(pool, mix, load, "azure" if arguments.azure and seed % 2 else "poisson", seed)
        for pool, mix, load, seed in product(PLAYED, MIXES, LOADS, range(arguments.seeds))
    ]
    with all_cores(OnGround(play, arguments.folder, arguments.azure, arguments.tune), label="playing") as run_all:
        report(dict(zip(tasks, run_all(tasks), strict=True)))


if __name__ == "__main__":
    main()
