"""The report of a comparison, in words."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.rooms.compare.report import cost_of, page

COMPARED: dict[str, Any] = {
    "stage": "stopped",
    "sentence": "Nothing is known.",
    "arms": {"one": {"replicas": ["a"]}, "other": {"replicas": ["b"]}},
    "findings": [],
    "minutes": 2.0,
    "blocks": 3,
    "began_s": 1_700_000_000.0,
    "policies": [],
    "usual": True,
    "cost": None,
}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stage": "running"}, "It is not known yet"),
        ({}, "It is not known what comparing cost"),
        ({"usual": False}, "is not measured"),
        ({"policies": ["learned", "random"]}, "is not measured"),
    ],
)
def test_why_the_cost_is_not_known(fields: dict[str, Any], words: str) -> None:
    assert words in cost_of(COMPARED | fields)


def test_the_page_says_when_it_was() -> None:
    assert "2 minutes on 2023-11-14, 3 blocks of time" in page("m", COMPARED)
