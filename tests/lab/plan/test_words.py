"""A plan in sentences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from backends.calibration.load import load_calibration
from backends.speculation import Method
from backends.validation import UsageError
from lab.plan.compared import read_findings
from lab.plan.mixes import Mix, kinds
from lab.plan.result import JudgedMix, Plan, PlanObjective
from lab.plan.show import to_change, verdict
from lab.statistics import Interval

H100 = load_calibration("llama-3.1-8b-h100")
SUFFIX, HEAD = 3, 6
ALIKE, SUFFIXES, MIXED = (HEAD, HEAD), (SUFFIX, SUFFIX), (SUFFIX, HEAD)


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
        (
            ALIKE,
            Interval(-0.1, -0.12, -0.08),
            "has not seen, 1x suffix, 1x eagle3 k=3 is better, with a loss of -10.0% (-12.0% to",
        ),
        (ALIKE, None, "cannot be compared"),
    ],
)
def test_a_difference_is_called_one_if_its_interval_excludes_nought(
    chosen: Mix, loss: Interval | None, said: str
) -> None:
    assert said in verdict(_plan(chosen, loss), PlanObjective())
    of_slo = verdict(_plan(chosen, loss), PlanObjective({"ttft": 1.0}))
    assert of_slo.endswith(" It keeps the SLO of 100.0% of the requests.")


def test_any_other_mix_that_is_better_on_unseen_windows_is_said() -> None:
    plan = _plan(MIXED, Interval(0.1, 0.08, 0.12))
    better = JudgedMix(SUFFIXES, 0.9, 0.1, 0.01, 0.9, Interval(-0.1, -0.12, -0.08), 0.0)
    more = replace(better, mix=(SUFFIX,) * 3)
    said = "3. Yet on windows that the search has not seen, 2x suffix is better, with a loss of -10.0%"
    assert said in verdict(replace(plan, judged=(plan.judged[0], more, better, plan.judged[1])), PlanObjective())
    assert "a mixed pool is best" in verdict(replace(plan, judged=(*plan.judged, more)), PlanObjective())


@pytest.mark.parametrize(
    ("ratio", "beside"),
    [
        (0.8, "On 2027-01-15 requests took 20% less time with eagle3 than with suffix at 3.2 in flight per replica"),
        (0.8, "(99%: 10% less time to 30% less time); simulated, 2x eagle3 k=3 takes 9% less time than 2x suffix."),
        (
            1.25,
            "Not to be relied on, as live traffic contradicts it: on 2027-01-15 requests took 20% less time with",
        ),
    ],
)
def test_a_comparison_on_live_traffic_stands_beside_what_is_simulated(
    ratio: float, beside: str, tmp_path: Path
) -> None:
    better, other = ("eagle3", "b") if ratio < 1.0 else ("b", "eagle3")
    point = {"ratio": 0.8, "low": 0.7, "high": 0.9, "in_flight": 3.2}
    arms = {"eagle3": {"replicas": ["e"]}, "b": {"replicas": ["s0", "s1"]}}
    document = {
        "stage": "decided",
        "began_s": 1.8e9,
        "arms": arms,
        "findings": [{"better": better, "other": other, "at_mean": point}],
    }
    path = tmp_path / "found.json"
    path.write_bytes(orjson.dumps({"models": {"llama": document}, "waits": {}}))
    (found,) = read_findings(path, "llama", {"s0": Method.SUFFIX, "s1": Method.SUFFIX})
    judged = (JudgedMix(each, took_s, 0.1, 0.01, took_s, None, 0.0) for each, took_s in ((ALIKE, 1.0), (SUFFIXES, 1.1)))
    assert beside in found.beside(replace(_plan(ALIKE, None), judged=tuple(judged)))
    unlike = found.beside(_plan(ALIKE, None))
    assert unlike.endswith("less time); here not both are among the best mixes, all replicas alike.")
    with pytest.raises(UsageError, match=r"eagle3 and b \(decided\) says nothing of two methods"):
        read_findings(path, None, {})
    with pytest.raises(UsageError, match="needs findings of model 'other'; it has llama"):
        read_findings(path, "other", {})
    path.write_text("{")
    with pytest.raises(UsageError, match="is not what `gateway compare status --json` prints"):
        read_findings(path, None, {})


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
