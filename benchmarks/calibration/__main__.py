"""Print how far the simulator is from published figures: `python -m benchmarks.calibration`.

`base TABLE` prints how well base engines' step times, fitted on half of what was measured, give the other half, and
`base TABLE FILE` writes those of all (base.py).
`scaled TABLE` prints how far calibrations scaled to another GPU are off (scaled.py).

Every figure was simulated once; the tables that they come from are not part of the project. Of those without a licence
only the errors are here.

results.csv     each figure with its source: fitted on (`fit`), only reported (`report`), with adaptive verification and
                step times fitted to other runs (`adaptive`), or by a formula; `blind`: acceptance by the calibration;
                those of A100 and L40S with a context that costs 0.28 of itself more for each draft
winners.csv     the fastest run of each group, simulated and measured, and the share of its speed that the first loses
crossings.csv   the concurrency from which on a method is slower than none
left_out.csv    what could not be simulated, and why
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from benchmarks.calibration import base
from benchmarks.calibration.scaled import errors
from benchmarks.table import head

AIMS = ("*aim* | | | <= 8% | >= 90% | >= 90% | |", "*aim* | | | <= 10% |", "*aim* | | <= 1.5 | |", "*aim* | | <= 10% |")
NEARLY = 0.05
"""Share of its speed that a choice may lose to be nearly right: ratios between sweeps are no more accurate."""
Row = dict[str, str]


def read(name: str) -> list[Row]:
    """Return the rows of a table beside this file."""
    with (Path(__file__).with_name(name)).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def print_table(columns: str, rows: Iterable[str]) -> None:
    """Print a Markdown table."""
    print(head(*columns.split(" | ")), *(f"| {each} |" for each in rows), "", sep="\n")


def speedups(results: list[Row], winners: list[Row]) -> Iterable[str]:
    """Yield how far the speedups are off, and whether the fastest run of a group is named."""
    yield AIMS[0]
    for part in ("fit", "report"):
        of_part = [row for row in results if row["part"] == part and row["quantity"] == "speedup"]
        for acceptance, column in (("as measured", "error"), ("blind", "blind_error")):
            errors = [abs(float(row[column])) for row in of_part if row[column]]
            groups = [row for row in winners if (row["part"], row["acceptance"]) == (part, acceptance)]
            lost = [float(row["lost"]) for row in groups]
            methods = sum(row["simulated"].split()[0] == row["measured"].split()[0] for row in groups)
            yield (
                f"{part} | {acceptance} | {len(errors)} | {median(errors):.1%} "
                f"| {sum(error <= 0.2 for error in errors) / len(errors):.0%} "
                f"| {lost.count(0.0)} of {len(lost)} | {sum(each <= NEARLY for each in lost)} | {methods}"
            )


def held_out(results: list[Row]) -> Iterable[str]:
    """Yield how far tokens per second are off that nothing was fitted on."""
    yield AIMS[1]
    rows = [row for row in results if (row["part"], row["quantity"]) == ("report", "output_tok_s")]
    errors = [abs(float(row["error"])) for row in rows]
    yield f"all | the fitting part | {len(errors)} | {median(errors):.1%} | {max(errors):.0%}"


def crossings(found: list[Row]) -> Iterable[str]:
    """Yield how far the concurrencies are off from which on a method is slower than none."""
    yield AIMS[2]
    factors = [float(row["factor"]) for row in found]
    within = f"{sum(factor <= 1.5 for factor in factors)} of {len(factors)}"
    yield f"all | {len(factors)} | {median(factors):.2f} | {within} | {max(factors):.2f}"


def first_tokens(results: list[Row]) -> Iterable[str]:
    """Yield how far the times to the first token are off."""
    yield AIMS[3]
    rows = [row for row in results if row["quantity"] == "ttft_median_ms"]
    for method in (*sorted({row["method"].split()[0] for row in rows}), "all"):
        errors = [abs(float(row["error"])) for row in rows if method in (row["method"].split()[0], "all")]
        yield f"{method} | {len(errors)} | {median(errors):.1%} | {max(errors):.0%}"


def main(arguments: list[str]) -> None:
    """Print what was asked for; without arguments the four tables of the page."""
    match arguments:
        case ["base", table]:
            print_table(
                "setup | engine | cells held out | median error | P90",
                [*base.base_engines(Path(table)), *base.other_versions(Path(table))],
            )
        case ["base", table, file]:
            base.write(Path(table), Path(file))
        case ["scaled", table]:
            print_table("scaled from | figures | median error | largest", errors(Path(table)))
        case ["-h" | "--help"]:
            print(__doc__)
        case []:
            print_tables()
        case _:
            sys.exit(__doc__)


def print_tables() -> None:
    """Print the four tables of the page."""
    results = read("results.csv")
    columns = "part | acceptance | speedups | median abs. error | within 20% | winner right | nearly | right method"
    print_table(columns, speedups(results, read("winners.csv")))
    print_table("tokens/s of | fitted on | figures | median abs. error | largest", held_out(results))
    print_table("crossing point | curves | median factor | within 1.5 | largest", crossings(read("crossings.csv")))
    print_table("TTFT of | figures | median abs. error | largest", first_tokens(results))


if __name__ == "__main__":
    main(sys.argv[1:])
