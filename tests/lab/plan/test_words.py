"""A plan in sentences."""

from __future__ import annotations

import pytest

from backends.calibration.load import load_calibration
from lab.plan.mixes import Mix, kinds
from lab.plan.result import JudgedMix, Plan, PlanObjective
from lab.plan.show import to_change, verdict
from lab.statistics import Interval

H100 = load_calibration("llama-3.1-8b-h100")
SUFFIX, HEAD = 3, 6
ALIKE, MIXED = (HEAD, HEAD), (SUFFIX, HEAD)


def _plan(chosen: Mix, loss: Interval | None, present: Mix | None = None) -> Plan:
    rival = MIXED if chosen == ALIKE else ALIKE
    judged = (JudgedMix(chosen, 1.0, 0.1, 0.01, 1.0, None, 0.0), JudgedMix(rival, 1.1, 0.1, 0.01, 1.1, loss, 1.0))
    return Plan(tuple(kinds(H100, 4096)), chosen, judged, ALIKE, MIXED, present, 2)


@pytest.mark.parametrize(
    ("chosen", "loss", "said"),
    [
        (ALIKE, Interval(0.1, 0.08, 0.12), "all replicas alike is best. The best of several methods, 1x suffix"),
        (MIXED, Interval(0.1, 0.08, 0.12), "a mixed pool is best. The best with all replicas alike, 2x eagle3 k=3"),
        (ALIKE, Interval(0.1, 0.08, 0.12), "takes 10.0% (8.0% to 12.0%) longer."),
        (ALIKE, Interval(0.1, -0.08, 0.28), "no mix of methods is shown to be better than all replicas alike"),
        (ALIKE, Interval(0.1, -0.08, 0.28), "which may be chance"),
        (ALIKE, None, "cannot be compared"),
    ],
)
def test_a_difference_is_called_one_if_its_interval_excludes_nought(
    chosen: Mix, loss: Interval | None, said: str
) -> None:
    assert said in verdict(_plan(chosen, loss), PlanObjective())


@pytest.mark.parametrize(
    ("present", "said"),
    [
        (None, None),
        ((SUFFIX, HEAD), "To change: nothing; this mix runs now."),
        ((SUFFIX, SUFFIX, SUFFIX), "To change: 2x suffix -> 1x eagle3 k=3."),
        ((HEAD,), "To change: nothing -> 1x suffix."),
    ],
)
def test_what_to_change_is_the_difference_to_the_present_mix(present: Mix | None, said: str | None) -> None:
    assert to_change(_plan(MIXED, None, present)) == said
