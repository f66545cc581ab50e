"""The report of a comparison, in words, and what to change as it is written for vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.rooms.compare.report import cost_of, lines_of


def against(other: str, lows: dict[float, float]) -> dict[str, Any]:
    """Return how k = 3 compares with another depth, by load."""
    curve = [{"in_flight": load, "work_per_s": load, "low": low} for load, low in lows.items()]
    return {"better": "k = 3", "other": other, "curve": curve}


def test_why_the_cost_is_not_known() -> None:
    ended = {"cost": None, "stage": "stopped", "usual": True, "policies": []}
    assert "It is not known yet" in cost_of(ended | {"stage": "running"})
    assert "It is not known what comparing cost" in cost_of(ended)
    for without in ({"usual": False}, {"policies": ["learned", "random"]}):
        assert "is not measured" in cost_of(ended | without)


def test_a_smaller_depth_is_faster_once_it_is_configured() -> None:
    def point(in_flight: float, ratio: float) -> dict[str, float]:
        return {
            "in_flight": in_flight,
            "work_per_s": in_flight,
            "ratio": ratio,
            "low": 0.97 * ratio,
            "high": 1.03 * ratio,
        }

    # k = 5 takes 0.98 times as long as k = 1 where all passes are made: without them, k = 1 is the better one.
    finding = {"better": "k = 5", "other": "k = 1", "curve": [point(load, 0.98) for load in (2.0, 8.0)]}
    document = {"arms": {"k = 1": {}, "k = 5": {}}, "depths": [1, 5], "findings": [finding]}
    assert '"num_speculative_tokens": 5' in lines_of(document, "k = 5")
    head = {"method": "eagle3", "k": 5, "calibration": "llama-3.1-8b-h100"}
    as_measured, configured = lines_of(document | {"drafter": head}, "k = 5").split(
        "# by the passes of the calibration"
    )
    assert '"num_speculative_tokens": 5' in as_measured
    assert '"num_speculative_tokens": 1' in configured
    untold = lines_of(document | {"drafter": head | {"calibration": ""}}, "k = 5")
    assert "made all 5 passes at each depth" in untold
    assert untold.count("--speculative-config") == 1


@pytest.mark.parametrize(
    ("loads", "written"),
    [
        ({0.4: 1.2, 0.9: 0.9}, '"num_speculative_tokens": 3'),  # both are batches of one request
        ({0.4: 1.2, 0.9: 1.2, 1.3: 0.9, 2.6: 0.9}, '"num_speculative_tokens": 3'),
        ({0.4: 1.2, 1.2: 1.2, 1.6: 0.9, 5.0: 0.9, 9.0: 1.2}, "[[1, 1, 1], [2, 5, 3], [6, 9, 1]]"),
    ],
)
def test_ranges_of_batches_follow_one_another(loads: dict[float, float], written: str) -> None:
    document = {"arms": {"k = 1": {}, "k = 3": {}}, "depths": [1, 3], "findings": [against("k = 1", loads)]}
    assert written in lines_of(document, "k = 3")


def test_each_depth_is_taken_at_its_own_load() -> None:
    findings = [against("k = 1", {2.0: 0.9, 8.0: 0.9}), against("k = 5", {8.0: 0.9, 32.0: 1.3})]
    arms = {name: {} for name in ("k = 1", "k = 3", "k = 5")}
    document = {"arms": arms, "depths": [1, 3, 5], "findings": findings}
    assert '"num_speculative_tokens": 3' in lines_of(document, "k = 3"), "k = 5 is better from more than 8 on"
