"""What a comparison of depths comes to: the best depth by load, as vLLM takes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from backends.calibration.batch_schedule import SCHEDULE_KEY
from backends.speculation import Method
from policies.learned.prior import expected_step

Ranges = list[list[int]]
"""First and last number of requests in a batch, and the depth."""


def lines_of(document: Mapping[str, Any], better: str) -> str:
    """Return the lines to paste: as measured and, for a model that drafts, as it would be once configured.

    Where another depth than the better one was harmed, that one may have been faster, so no load is told apart.
    """
    if document.get("harmed"):
        return _option([[1, 1, document["depths"][[*document["arms"]].index(better)]]])
    loads = [point["in_flight"] for point in document["findings"][0]["curve"]]
    seen = f"# for {loads[0]:.0f} to {loads[-1]:.0f} requests in flight per replica, as seen"
    lines = [seen, _option(_best(document))]
    drafter = document.get("drafter")
    if drafter is not None:
        lines.append(
            f"# its drafter made all {drafter['k']} passes at each depth: once configured, a smaller one is faster"
        )
    if drafter is not None and drafter["calibration"]:
        lines += [
            f"# by the passes of the calibration {drafter['calibration']}, then",
            _option(_best(document, drafter)),
        ]
    return "\n".join(lines)


def configured(drafter: Mapping[str, Any], depth: int, in_flight: float) -> float:
    """Return the seconds of a step whose engine was started with a depth, over those of one that is asked for it.

    Examples
    --------
    >>> round(configured({"method": "eagle3", "k": 5, "calibration": "llama-3.1-8b-h100"}, 1, 8.0), 2)
    0.79
    """
    method, calibration = Method(drafter["method"]), drafter["calibration"]
    own = expected_step(calibration, method, depth)
    cut = expected_step(calibration, method, drafter["k"], verified_drafts=depth)
    seconds = [each.base_s + in_flight * each.per_request_s for each in (own, cut)]
    return seconds[0] / seconds[1]


def _best(document: Mapping[str, Any], drafter: Mapping[str, Any] | None = None) -> Ranges:
    """Return the best depth by load; another one than the best in the mean only where that is better for sure."""
    depths = dict(zip(document["arms"], document["depths"], strict=True))
    findings = document["findings"]
    best = depths[findings[0]["better"]]
    ranges: Ranges = []
    for at, load in enumerate(point["in_flight"] for point in findings[0]["curve"]):
        chosen, least = best, 1.0
        for each in findings:
            other = depths[each["other"]]
            factor = 1.0 if drafter is None else configured(drafter, other, load) / configured(drafter, best, load)
            if factor / each["curve"][at]["low"] < least:
                chosen, least = other, factor / each["curve"][at]["low"]
        if ranges and ranges[-1][2] == chosen:
            ranges[-1][1] = round(load)
        else:
            ranges.append([1 if not ranges else ranges[-1][1] + 1, max(1, round(load)), chosen])
    return ranges


def _option(ranges: Ranges) -> str:
    key, value = (_TOKENS, ranges[0][2]) if len(ranges) == 1 else (SCHEDULE_KEY, ranges)
    return f"--speculative-config '{{..., \"{key}\": {json.dumps(value)}}}'"


_TOKENS: Final = "num_speculative_tokens"
