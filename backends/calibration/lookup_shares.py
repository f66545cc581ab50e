"""What n-gram and suffix lookups gave on recorded texts, for requests of which no text is known (`lookups.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from backends.calibration.calibration import NEAREST, Kind
from backends.speculation import Method

Share = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, slots=True)
class Lookup:
    """One kind of text.

    Parameters
    ----------
    drafted, accepted
        Share of steps that draft, and that get accepted, at least 1, 2, ..., k tokens; `accepted` is never above.
    request_spread
        Standard deviation between requests of the logits of both.
    """

    drafted: tuple[float, ...]
    accepted: tuple[float, ...]
    request_spread: float


class _Shares(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    request_spread: float = Field(ge=0)
    drafted: tuple[Share, ...] = Field(min_length=2)
    accepted: tuple[Share, ...] = Field(min_length=2)


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Method
    k: int = Field(ge=2)
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0
    by_kind: dict[Kind, _Shares]


def lookup_shares(method: Method, kind: str, k: int, low: int = 0, high: int = 0) -> Lookup:
    """Return what a lookup gives in text of a kind: of what was fitted, the nearest in n, then in k.

    Parameters
    ----------
    method
        n-gram or suffix.
    kind
        Kind of text, one of `calibration.Kind`; an unknown one counts as chat.
    k
        Tokens drafted at most.
    low, high
        The bounds of the n-gram lookup.
    """
    entries = [entry for entry in _entries() if entry.method is method]

    def distance(entry: _Entry) -> tuple[int, int]:
        bounds = abs(entry.prompt_lookup_min - low) + abs(entry.prompt_lookup_max - high)
        return bounds, abs(entry.k - k)

    by_kind = min(entries, key=distance).by_kind
    wanted = Kind(kind) if kind in set(Kind) else Kind.CHAT
    while wanted not in by_kind:
        wanted = NEAREST[wanted]
    shares = by_kind[wanted]
    return Lookup(_to(shares.drafted, k), _to(shares.accepted, k), shares.request_spread)


def _to(shares: tuple[float, ...], k: int) -> tuple[float, ...]:
    """Return the shares of positions 1 to k."""
    further = list(shares[:k])
    while len(further) < k:
        further.append(further[-1] * shares[-1] / shares[-2] if shares[-2] else 0.0)
    return tuple(further)


@cache
def _entries() -> tuple[_Entry, ...]:
    file = resources.files("backends.calibration").joinpath("lookup_shares.yaml")
    return TypeAdapter(tuple[_Entry, ...]).validate_python(yaml.safe_load(file.read_text(encoding="utf-8")))
