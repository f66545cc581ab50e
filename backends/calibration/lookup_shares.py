"""Draft lengths and acceptance of n-gram and suffix drafting on recorded texts, for requests whose text is unknown."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from backends.calibration.calibration import Kind, nearest_kind
from backends.speculation import Method

Share = Annotated[float, Field(ge=0, lt=1)]


class LookupShares(BaseModel):
    """Shares of the steps on one kind of text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # drafted, accepted: share of steps in which at least 1, 2, ..., k tokens are drafted, and accepted.
    drafted: tuple[Share, ...] = Field(min_length=2)
    accepted: tuple[Share, ...] = Field(min_length=2)
    request_spread: float = Field(ge=0)  # standard deviation between requests of the logits of both


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Method
    k: int = Field(ge=2)
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0
    by_kind: dict[Kind, LookupShares]


def lookup_shares(method: Method, kind: str, k: int, low: int = 0, high: int = 0) -> LookupShares:
    """Return the shares of the fitted configuration that is nearest, first in n, then in k.

    Examples
    --------
    >>> lookup_shares(Method.NGRAM, "chat", 3, 2, 4).accepted
    (0.1861, 0.1266, 0.0981)
    """
    entries = [entry for entry in _entries() if entry.method is method]

    def distance(entry: _Entry) -> tuple[int, int]:
        bounds = abs(entry.prompt_lookup_min - low) + abs(entry.prompt_lookup_max - high)
        return bounds, abs(entry.k - k)

    by_kind = min(entries, key=distance).by_kind
    shares = by_kind[nearest_kind(kind, by_kind)]
    drafted, accepted = _extend(shares.drafted, k), _extend(shares.accepted, k)
    return shares.model_copy(update={"drafted": drafted, "accepted": accepted})


def _extend(shares: tuple[float, ...], k: int) -> tuple[float, ...]:
    """Return the shares of positions 1 to k, extrapolated by the ratio of the last two."""
    extended = list(shares[:k])
    while len(extended) < k:
        extended.append(extended[-1] * shares[-1] / shares[-2] if shares[-2] else 0.0)
    return tuple(extended)


@cache
def _entries() -> tuple[_Entry, ...]:
    file = resources.files("backends.calibration").joinpath("lookup_shares.yaml")
    return TypeAdapter(tuple[_Entry, ...]).validate_python(yaml.safe_load(file.read_text(encoding="utf-8")))
