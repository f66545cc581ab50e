"""Liberal readers of a record's values; each raises a ValueError that describes an invalid value."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from backends.speculation import Method

METHODS = {method.value: method.value for method in Method}

_LARGEST_COUNT = 2**64 - 1
_LATEST_S = 1e11  # the year 5138; clocks in milliseconds or nanoseconds exceed it


def read_text(value: object) -> str:
    """Return a text; convert numbers."""
    return str(value) if isinstance(value, int | float) else read_string(value)


def read_string(value: object) -> str:
    """Return a text."""
    if isinstance(value, str):
        return value
    raise ValueError(f"expected a text, not {describe_type(value)}")


def read_object(value: object) -> dict[str, Any]:
    """Return an object."""
    if isinstance(value, dict):
        return value
    raise ValueError(f"expected an object, not {describe_type(value)}")


def read_number(value: object) -> float:
    """Return a finite number."""
    if type(value) is float or type(value) is int:
        if math.isfinite(value):
            return float(value)
        raise ValueError("expected a finite number")
    raise ValueError(f"expected a number, not {describe_type(value)}")


def read_not_negative(value: object) -> float:
    """Return a finite number, 0 or more."""
    number = read_number(value)
    if number < 0:
        raise ValueError(f"expected 0 or more, not {number:g}")
    return number


def read_share(value: object) -> float:
    """Return a number from 0 to 1."""
    number = read_number(value)
    if not 0 <= number <= 1:
        raise ValueError(f"expected 0 to 1, not {number:g}")
    return number


def read_count(value: object) -> int:
    """Return a whole number from 0 to 2^64 - 1, the largest that can be written back."""
    if type(value) is int and 0 <= value <= _LARGEST_COUNT:
        return value
    number = read_number(value)
    if number < 0 or number != int(number):
        raise ValueError(f"expected a whole number, 0 or more, not {number:g}")
    if number > _LARGEST_COUNT:
        raise ValueError(f"expected at most 2^64 - 1, not {number:g}")
    return int(number)


def read_truth(value: object) -> bool:
    """Return true or false; accept 1 and 0."""
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise ValueError(f"expected true or false, not {describe_type(value)}")


def read_time(value: object) -> float:
    """Return seconds: a number unchanged, an ISO 8601 time as seconds since 1970 (UTC unless it names a zone).

    Examples
    --------
    >>> read_time("1970-01-01 00:01:00Z"), read_time("2.5")
    (60.0, 2.5)
    """
    if isinstance(value, str):
        try:
            seconds = read_number(float(value))
        except ValueError:
            return _of_iso(value)
    else:
        seconds = read_number(value)
    if abs(seconds) >= _LATEST_S:
        raise ValueError(f"expected seconds, not {seconds:g}: are these milliseconds or less?")
    return seconds


def _of_iso(text: str) -> float:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"expected seconds or an ISO 8601 time, not {text[:40]!r}") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def read_method(value: object) -> str:
    """Return the name of a method; convert known names to lower case."""
    name = read_string(value)
    return METHODS.get(name.lower(), name)


def describe_type(value: object) -> str:
    """Return the type of an invalid value, or its text, for an error message."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"{value!r:.40}")
