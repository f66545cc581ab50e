"""The conformance report: what of the protocol a picker keeps, by requirement."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from .requirement import Requirement, Source

MET, NOT_MET, NOT_TESTED = "met", "NOT MET", "not tested"
_WORST_FIRST = (NOT_MET, MET, NOT_TESTED)


@dataclass
class Result:
    """What the cases of one test say about its requirement.

    Attributes
    ----------
    details
        Why it is not met, or has not been tested.
    """

    test: str
    requirement: Requirement
    result: str
    details: str = ""

    def add(self, result: str, details: str) -> None:
        """Add a further case: the requirement is met if those that were tested all say so."""
        if _WORST_FIRST.index(result) < _WORST_FIRST.index(self.result):
            self.result, self.details = result, details


def results_of(reporter: pytest.TerminalReporter) -> list[Result]:
    """Return the results of a run, in the order of the sources and of the tests."""
    found: dict[str, Result] = {}
    for report in itertools.chain.from_iterable(reporter.stats.values()):
        if not isinstance(report, pytest.TestReport):
            continue
        stated = next((value for name, value in report.user_properties if name == "requirement"), None)
        if not isinstance(stated, tuple | list) or (report.passed and report.when != "call"):
            continue
        test = report.nodeid.partition("[")[0].rpartition("/")[2]
        result, details = _judged(report)
        if test in found:
            found[test].add(result, details)
        else:
            found[test] = Result(test, Requirement(stated[0], Source(stated[1]), stated[2]), result, details)
    return sorted(found.values(), key=lambda each: (list(Source).index(each.requirement.source), each.test))


def _judged(report: pytest.TestReport) -> tuple[str, str]:
    """Return the result of a case, and in a line why."""
    if report.passed:
        return MET, ""
    if isinstance(report.longrepr, tuple | list):  # skipped: file, line, reason
        return NOT_TESTED, report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash else str(report.longrepr)
    return NOT_MET if report.when == "call" else NOT_TESTED, message.splitlines()[0].removeprefix("AssertionError: ")


def write_report(reporter: pytest.TerminalReporter, found: list[Result], target: str) -> None:
    """Write the report to the terminal."""
    reporter.section(f"endpoint-picker conformance of {target}", sep="=")
    for source, results in itertools.groupby(found, lambda each: each.requirement.source):
        reporter.write_line(f"\n{source}", bold=True)
        for each in results:
            colour = {MET: "green", NOT_MET: "red", NOT_TESTED: "yellow"}[each.result]
            reporter.write(f"  {each.requirement.strength:<6} {each.result:<10} ", **{colour: True})
            reporter.write_line(each.requirement.sentence)
            if each.result != MET:
                reporter.write_line(f"{'':20}{each.test}: {each.details}")
    reporter.write_line("")
    for strength in ("MUST", "SHOULD"):
        counted = [each.result for each in found if each.requirement.strength == strength]
        reporter.write_line(
            f"{strength}: {counted.count(MET)} of {len(counted)} met, {counted.count(NOT_MET)} not met, "
            f"{counted.count(NOT_TESTED)} not tested"
        )
