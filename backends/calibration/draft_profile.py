"""What a method drafts and gets accepted where no text is known: shares by position, from which steps are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.calibration.calibration import Calibration
from backends.calibration.lookup_shares import lookup_shares
from backends.calibration.parameters import draft_tokens
from backends.drafting.ngram import lookup_bounds
from backends.speculation import Method


@dataclass(frozen=True, slots=True)
class DraftProfile:
    """How requests of one sort are drafted for.

    Parameters
    ----------
    drafted
        Share of steps that draft at least 1, 2, ..., k tokens; empty for methods that draft k in every step.
    accepted
        Shape (k,). Where `drafted` is empty, the probability that the draft at a position is accepted if those before
        it were; else the share of steps that get at least 1, 2, ..., k drafts accepted.
    request_spread
        Standard deviation between requests of the logits of both.
    factor
        What probabilities of acceptance are multiplied by, after the shift of their logits.
    progress
        How their logits shift as the answer grows, linearly between knots and flat beyond: output tokens, and shifts.
    """

    accepted: tuple[float, ...] = ()
    drafted: tuple[float, ...] = ()
    request_spread: float = 0.0
    factor: float = 1.0
    progress: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())


def draft_profile(
    calibration: Calibration,
    method: Method,
    speculative_config: Mapping[str, Any] | None = None,
    *,
    temperature: float = 0.0,
    kind: str = "chat",
) -> DraftProfile:
    """Return the profile of a method: the calibration's acceptance, for lookups what they gave on recorded texts.

    Parameters
    ----------
    temperature
        Sampling temperature; lookups are taken to give the same at all of them.
    kind
        Kind of text, one of `calibration.Kind`; an unknown one counts as chat.

    Raises
    ------
    ValueError
        If the calibration has no acceptance for the method, or the configuration is wrong.
    """
    config = speculative_config or {}
    k = draft_tokens(method, config)
    if k == 0:
        return DraftProfile()
    if method in (Method.NGRAM, Method.SUFFIX):
        bounds = lookup_bounds(config) if method is Method.NGRAM else (0, 0)
        lookup = lookup_shares(method, kind, k, *bounds)
        return DraftProfile(lookup.accepted, lookup.drafted, lookup.request_spread)
    acceptance = calibration.acceptance(method, kind)
    rates = acceptance.by_position
    rates = (*rates, *[rates[-1]] * (k - len(rates)))[:k]  # the last holds beyond
    seen = acceptance.progress
    return DraftProfile(
        rates,
        request_spread=acceptance.request_spread,
        factor=calibration.temperature.factor(temperature),
        progress=(seen.output_tokens, seen.logit_shifts) if seen else ((), ()),
    )
