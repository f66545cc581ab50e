"""Print a calibration's speed under load by method: `python -m benchmarks.calibration.loads DATA [CALIBRATION]`.

Prompts and answers of SpecDecode-Bench, greedy, in a closed loop of four rounds. The chat answers are cut at the length
that serving benchmarks use, because single answers of thousands of tokens would leave the engine empty at the end.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from backends.calibration.calibration import load_calibration
from backends.speculation import Method
from benchmarks.calibration.cases import Case, Closed, Group, Work
from benchmarks.calibration.facts import config_of
from benchmarks.calibration.play import play
from benchmarks.calibration.scripts import scripts
from benchmarks.calibration.texts import Texts

CONCURRENCY = (1, 8, 32, 64, 128)
TEXTS = {"chat": "sharegpt-served", "code": "instructcoder", "summarization": "cnn_dailymail"}
METHODS = {
    Method.BASELINE: 0,
    Method.NGRAM: 5,
    Method.SUFFIX: 0,
    Method.EAGLE: 3,
    Method.EAGLE3: 3,
    Method.DRAFT_MODEL: 3,
}


def main() -> None:
    """Print the table: the baseline's tokens/s, and the speedups over it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="directory with specdecode_bench")
    parser.add_argument("calibration", nargs="?", default="llama-3.1-8b-h100")
    arguments = parser.parse_args()
    calibration, texts = load_calibration(arguments.calibration), Texts(arguments.data)
    print("| text | method |", *(f"{clients} |" for clients in CONCURRENCY))
    print("|---|---|" + "---|" * len(CONCURRENCY))
    for kind, name in TEXTS.items():
        plain: dict[int, float] = {}
        for method, k in METHODS.items():
            cells = []
            for clients in CONCURRENCY:
                group = Group(calibration.name, "texts", kind, f"{clients}")
                load = Closed(clients, max(48, 4 * clients))
                case = Case(group, str(method), method, config_of(method, k), load, Work(kind, texts=name), {})
                requests = scripts(case, calibration, texts, blind=True)
                tok_s = play(case, calibration, requests).figures["output_tok_s"]
                plain.setdefault(clients, tok_s)
                cells.append(f"{tok_s:,.0f}" if method is Method.BASELINE else f"{tok_s / plain[clients]:.2f}")
            what = f"{method}, tokens/s" if method is Method.BASELINE else str(method)
            print(f"| {kind} | {what} |", *(f"{cell} |" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
