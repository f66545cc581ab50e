"""Draft profiles: tokens that a method drafts and gets accepted per step, to sample steps for unknown text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from backends.calibration.calibration import Calibration, Kind, nearest_kind
from backends.draft_schedule import draft_tokens
from backends.drafting.ngram import lookup_bounds
from backends.speculation import Method

Share = Annotated[float, Field(ge=0, lt=1)]


_TRAINED_FOR_ONE = frozenset({Method.MTP, Method.EAGLE})
"""Methods whose single layer, trained to draft one token from the target's state, continues from its own state."""


class LookupShares(BaseModel):
    """Shares of the steps on one kind of text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # drafted, accepted: share of steps that draft, and accept, at least 1, 2, ..., k tokens.
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
    """Return the shares of the nearest fitted configuration, first in n, then in k.

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


@dataclass(frozen=True, slots=True)
class DraftProfile:
    """Drafting and acceptance of one method on one kind of text."""

    # Shape (k,). If `drafted` is empty, the probability that the draft at a position is accepted if those before it
    # were; otherwise the share of steps that accept at least 1, 2, ..., k drafts.
    accepted: tuple[float, ...] = ()
    # Share of steps that draft at least 1, 2, ..., k tokens; empty for methods that always draft k.
    drafted: tuple[float, ...] = ()
    request_spread: float = 0.0  # standard deviation between requests of the logits of both
    factor: float = 1.0  # factor of the acceptance probabilities, applied after the shift of their logits
    confidence_window: float = 0.0  # see `Acceptance.confidence_window`; 0 for None
    # Output tokens, and shifts of the logits at these; linear between them, constant beyond.
    progress: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
    # Tokens of context, and shifts of the logits there by position; see `ContextShift`.
    context: tuple[tuple[int, ...], tuple[tuple[float, ...], ...]] = ((), ())


def draft_profile(
    calibration: Calibration,
    method: Method,
    speculative_config: Mapping[str, Any] | None = None,
    *,
    temperature: float = 0.0,
    kind: str = "chat",
) -> DraftProfile:
    """Return the profile of a method, from the calibration or, for n-gram and suffix drafting, from recorded texts.

    Examples
    --------
    >>> from backends.calibration.load import load_calibration
    >>> calibration = load_calibration("llama-3.1-8b-h100")
    >>> profile = draft_profile(calibration, Method.EAGLE3, {"num_speculative_tokens": 3}, kind="code")
    >>> len(profile.accepted), profile.drafted
    (3, ())
    """
    config = speculative_config or {}
    k = draft_tokens(method, config)
    if k == 0:
        return DraftProfile()
    if method in (Method.NGRAM, Method.SUFFIX):
        bounds = lookup_bounds(config) if method is Method.NGRAM else (0, 0)
        shares = lookup_shares(method, kind, k, *bounds)
        return DraftProfile(shares.accepted, shares.drafted, shares.request_spread)
    acceptance = calibration.acceptance(method, kind)
    rates = rates_to(method, acceptance.by_position, k)
    progress, context = acceptance.progress, calibration.method(method).context
    return DraftProfile(
        rates,
        request_spread=acceptance.request_spread,
        factor=calibration.temperature.factor(temperature),
        confidence_window=acceptance.confidence_window or 0.0,
        progress=(progress.output_tokens, progress.logit_shifts) if progress else ((), ()),
        context=(context.tokens, tuple((*row, *[row[-1]] * (k - len(row)))[:k] for row in context.logit_shifts))
        if context
        else ((), ()),
    )


def rates_to(method: Method, rates: Sequence[float], k: int) -> tuple[float, ...]:
    """Return the acceptance rates of k positions, given those of the first few; a single one holds for all.

    Rates of a layer trained for one position fall towards a floor: each drop of the logit is 0.7 of the one before.
    Heads trained to follow their own drafts, and blocks, have a constant rate: its logit weighs the mean logit of the
    last two rates by 0.6, and that of 0.7, where all measured positions 4 to 8 were, by 0.4.

    Examples
    --------
    >>> [round(rate, 2) for rate in rates_to(Method.MTP, (0.79, 0.61, 0.46), 6)]
    [0.79, 0.61, 0.46, 0.36, 0.29, 0.25]
    >>> [round(rate, 2) for rate in rates_to(Method.EAGLE3, (0.79, 0.61, 0.58), 5)]
    [0.79, 0.61, 0.58, 0.64, 0.64]
    """
    further = k - len(rates)
    if further <= 0 or len(rates) == 1:
        return (*rates[:k], *[rates[0]] * further)
    before, logit = (_logit(rate) for rate in rates[-2:])
    if method not in _TRAINED_FOR_ONE:
        return (*rates, *[_rate(0.6 * (before + logit) / 2 + 0.4 * _logit(0.7))] * further)
    fall = min(0.0, logit - before)
    for _ in range(further):
        fall *= 0.7
        logit += fall
        rates = (*rates, _rate(logit))
    return tuple(rates)


def _logit(rate: float) -> float:
    return math.log(rate / (1 - rate))


def _rate(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))
