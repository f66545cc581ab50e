from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from backends.validation import Issue, issues_of
from policies.features.request import Endpoint, RequestFeatures
from policies.rules.conditions import Bounds, When
from policies.rules.matching import CompiledCondition


def holds(bounds: Bounds, value: float) -> bool:
    request = RequestFeatures("m", Endpoint.CHAT, temperature=float(value))
    return CompiledCondition("temperature", bounds).holds(request, 0.0)


@pytest.mark.parametrize(
    ("written", "inside", "outside"),
    [
        ("<0.5", [0.49, -3], [0.5]),
        ("<= .5", [0.5], [0.51]),
        ("==1e3", [1000], [999]),
        (" >= 0.2  and < 0.5 ", [0.2, 0.49], [0.1, 0.5]),
        ("< 5 and < 3", [2], [3, 4]),
        (2, [2.0], [1, 3]),
        (0.5, [0.5], [0.4]),
    ],
)
def test_comparisons_are_parsed(written: object, inside: list[float], outside: list[float]) -> None:
    bounds = Bounds.parse(written)
    assert all(holds(bounds, value) for value in inside)
    assert not any(holds(bounds, value) for value in outside)


@pytest.mark.parametrize(
    "written", ["", ">> 1", "> x", "0.5", ">= 1 or < 3", "> 1 and", True, None, [1], "=> 1", "> nan"]
)
def test_invalid_comparisons_are_rejected_with_an_example(written: object) -> None:
    with pytest.raises(ValueError, match=r"is not a condition on a number: write a comparison such as '>= 0\.5'"):
        Bounds.parse(written)


@pytest.mark.parametrize("written", ["> 3 and < 2", "> 3 and < 3", "= 1 and > 1", ">= 2 and < 2"])
def test_unsatisfiable_comparisons_are_rejected(written: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"'{written}' can never hold")):
        Bounds.parse(written)


_OPERATORS = st.sampled_from([">", ">=", "<", "<=", "="])
_NUMBERS = st.integers(-4, 4).map(lambda quarter: quarter / 4)


@given(_OPERATORS, _NUMBERS, _OPERATORS, _NUMBERS, _NUMBERS)
def test_bounds_are_the_conjunction_of_comparisons_and_round_trip(
    first: str, low: float, second: str, high: float, value: float
) -> None:
    def compare(operator: str, number: float) -> bool:
        return {
            ">": value > number,
            ">=": value >= number,
            "<": value < number,
            "<=": value <= number,
            "=": value == number,
        }[operator]

    try:
        bounds = Bounds.parse(f"{first} {low} and {second} {high}")
    except ValueError:  # unsatisfiable, so it does not hold for this value either
        assert not (compare(first, low) and compare(second, high))
        return
    assert holds(bounds, value) == (compare(first, low) and compare(second, high))
    assert Bounds.parse(str(bounds)) == bounds


def issues(when: dict[str, object]) -> dict[str, Issue]:
    with pytest.raises(ValidationError) as raised:
        When.model_validate(when)
    return {str(issue.path[0]): issue for issue in issues_of(raised.value, When)}


def test_each_invalid_condition_is_reported_under_its_feature() -> None:
    found = issues(
        {
            "overlap": ">= 35",
            "turns": "< 1",
            "tools": "yes",
            "template": 12345678,
            "workload": "Code",
            "endpoint": ["chat", "chats"],
            "temperature": "hot",
        }
    )
    assert found["overlap"].message == "'>= 35' can never hold: overlap ranges from 0 to 1"
    assert found["turns"].message == "'< 1' can never hold: turns ranges from 1 to inf"
    assert found["tools"].message == "expected true or false"
    assert found["template"].message == "12345678 is not text: put it in quotes"
    assert found["workload"].message.startswith("'Code' can never hold: a workload has at most 40")
    assert found["endpoint"].message.startswith("'chats' can never hold: the endpoints are chat, completions")
    assert found["temperature"].message.startswith("'hot' is not a condition on a number")
    assert len(found) == 7


def test_a_feature_without_a_condition_is_an_error() -> None:
    assert issues({"overlap": None})["overlap"].message == "no condition is given"
    assert issues({"workload": []})["workload"].message.startswith("an empty list can never hold")


def test_conditions_are_written_readably() -> None:
    when = When.model_validate({"temperature": "<=0.50", "workload": ["code", "agent"], "tools": True, "n": 1})
    assert str(when) == "temperature <= 0.5, n = 1, tools true, workload agent or code"
    assert When.model_validate(when.model_dump(exclude_none=True)) == when
    assert str(When()) == "always"
    assert Bounds.parse(f"<= {1 / 3!r}").high < math.inf
