"""The report of a comparison, in words, and what to change as it is written for vLLM."""

from __future__ import annotations

import pytest

from gateway.rooms.compare.report import cost_of, lines_of


def test_why_the_cost_is_not_known() -> None:
    ended = {"cost": None, "stage": "stopped", "usual": True, "policies": []}
    assert "It is not known yet" in cost_of(ended | {"stage": "running"})
    assert "It is not known what comparing cost" in cost_of(ended)
    for without in ({"usual": False}, {"policies": ["learned", "random"]}):
        assert "is not measured" in cost_of(ended | without)


def test_a_smaller_depth_is_faster_once_it_is_configured() -> None:
    def point(in_flight: float, ratio: float) -> dict[str, float]:
        return {"in_flight": in_flight, "ratio": ratio, "low": 0.97 * ratio, "high": 1.03 * ratio}

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
    curve = [{"in_flight": load, "low": low} for load, low in loads.items()]
    finding = {"better": "k = 3", "other": "k = 1", "curve": curve}
    document = {"arms": {"k = 1": {}, "k = 3": {}}, "depths": [1, 3], "findings": [finding]}
    assert written in lines_of(document, "k = 3")
