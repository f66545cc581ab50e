"""Compare the simulator with measurements, or fit step times.

`python -m benchmarks.calibration FACTS DATA [--write] [--fit NAME]`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.calibration.collect import collect
from benchmarks.calibration.document import as_csv, left_out_csv, terminal
from benchmarks.calibration.fit import as_yaml
from benchmarks.calibration.run import compare, fitted
from benchmarks.calibration.texts import Texts

_HERE = Path(__file__).parent


def main() -> None:
    """Print or write the report, or print fitted step times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("facts", type=Path, help="directory of the published figures")
    parser.add_argument("data", type=Path, help="directory of the measured data")
    parser.add_argument("--write", action="store_true", help="write results.csv and left_out.csv of this folder")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="file to write every row to, with all its values")
    parser.add_argument("--fit", metavar="NAME", help="print the step times of a setup, fitted on the fitting part")
    arguments = parser.parse_args()
    collected = collect(arguments.facts, arguments.data)
    texts = Texts(arguments.data)
    if arguments.fit:
        calibration, free = fitted(arguments.fit, collected.cases, texts)
        print(as_yaml(calibration, free))
        return
    report = compare(collected.cases, texts)
    print(terminal(report))
    if arguments.rows:
        arguments.rows.write_text(as_csv(report, collected.figures, unlicensed=True), encoding="utf-8")
    if arguments.write:
        (_HERE / "results.csv").write_text(as_csv(report, collected.figures, unlicensed=False), encoding="utf-8")
        (_HERE / "left_out.csv").write_text(left_out_csv(collected.left_out), encoding="utf-8")


if __name__ == "__main__":
    main()
