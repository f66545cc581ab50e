"""What a test checks: a requirement with its strength and its source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest

PROTOCOL = "Endpoint-picker protocol 1.0.0"
EXT_PROC = "Envoy's ext_proc, HTTP and gRPC health checking"
USERS = "What users expect"
SOURCES = (PROTOCOL, EXT_PROC, USERS)

Test = TypeVar("Test", bound=Callable[..., object])


@dataclass(frozen=True)
class Requirement:
    """A sentence that a picker keeps or does not keep.

    Attributes
    ----------
    strength
        `MUST` or `SHOULD`.
    source
        One of `SOURCES`.
    """

    strength: str
    source: str
    sentence: str


def must(source: str, sentence: str) -> Callable[[Test], Test]:
    """Mark a test with what a picker has to do."""
    return pytest.mark.requirement(Requirement("MUST", source, sentence))


def should(source: str, sentence: str) -> Callable[[Test], Test]:
    """Mark a test with what is advised, or left open, and makes a difference to users."""
    return pytest.mark.requirement(Requirement("SHOULD", source, sentence))
