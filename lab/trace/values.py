"""The values of a record, read liberally; each reader raises a ValueError that says what is wrong with one."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from backends.speculation import Method

METHODS = {method.value: method.value for method in Method}

_FRACTION = re.compile(r"(\.\d{6})\d+")  # Azure writes seven digits, one more than datetime reads


def read_text(value: object) -> str:
    """Return a text; a number stands for one."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return str(value)
    raise ValueError(f"expected a text, not {kind_of(value)}")


def read_string(value: object) -> str:
    """Return a text."""
    if isinstance(value, str):
        return value
    raise ValueError(f"expected a text, not {kind_of(value)}")


def read_number(value: object) -> float:
    """Return a finite number."""
    if type(value) is float or type(value) is int:
        if math.isfinite(value):
            return float(value)
        raise ValueError("expected a finite number")
    raise ValueError(f"expected a number, not {kind_of(value)}")


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
    """Return a whole number, 0 or more."""
    if type(value) is int and value >= 0:
        return value
    number = read_number(value)
    if number < 0 or number != int(number):
        raise ValueError(f"expected a whole number, 0 or more, not {number:g}")
    return int(number)


def read_truth(value: object) -> bool:
    """Return true or false; 1 and 0 are read as such."""
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise ValueError(f"expected true or false, not {kind_of(value)}")


def read_time(value: object) -> float:
    """Return seconds: of a number as it is, of an ISO 8601 date and time since 1970 (UTC where it names no zone)."""
    if not isinstance(value, str):
        return read_number(value)
    try:
        return read_number(float(value))
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(_FRACTION.sub(r"\1", value.strip()))
    except ValueError:
        raise ValueError(f"expected seconds or an ISO 8601 time, not {value[:40]!r}") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def read_method(value: object) -> str:
    """Return the name of a method, those that are known in lower case."""
    name = read_string(value)
    return METHODS.get(name.lower(), name)


def kind_of(value: object) -> str:
    """Say what a value is that should have been another."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"{value!r:.40}")
