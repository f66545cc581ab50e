"""What a test checks: a requirement with its strength and its source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import pytest


class Source(StrEnum):
    """Who says it: a section of the endpoint-picker protocol 1.0.0, or else."""

    STREAMING = "Protocol 1.0.0: streaming mode"
    SUBSET = "Protocol 1.0.0: Endpoint Subset"
    DESTINATION = "Protocol 1.0.0: Destination Endpoint"
    SERVED = "Protocol 1.0.0: Destination Endpoint Served"
    HEALTH = "Protocol 1.0.0: Health Checking"
    EXT_PROC = "Envoy's ext_proc, HTTP and gRPC health checking"
    USERS = "What users expect"


Test = TypeVar("Test", bound=Callable[..., object])


@dataclass(frozen=True)
class Requirement:
    """A sentence that a picker keeps or does not keep.

    Attributes
    ----------
    strength
        `MUST` or `SHOULD`.
    """

    strength: str
    source: Source
    sentence: str

    def as_texts(self) -> list[str]:
        """Return the attributes as texts, which can be sent between processes."""
        return [self.strength, self.source.value, self.sentence]


def must(source: Source, sentence: str) -> Callable[[Test], Test]:
    """Mark a test with what a picker has to do."""
    return pytest.mark.requirement(Requirement("MUST", source, sentence))


def should(source: Source, sentence: str) -> Callable[[Test], Test]:
    """Mark a test with what is advised, or left open, and makes a difference to users."""
    return pytest.mark.requirement(Requirement("SHOULD", source, sentence))
