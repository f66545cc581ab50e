"""Draft profiles: tokens drafted and accepted per step by a method, to sample steps where the text is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.calibration.calibration import Calibration
from backends.calibration.lookup_shares import lookup_shares
from backends.draft_schedule import draft_tokens
from backends.drafting.ngram import lookup_bounds
from backends.speculation import Method


@dataclass(frozen=True, slots=True)
class DraftProfile:
    """Drafting and acceptance of one method on one kind of text."""

    # Shape (k,). If `drafted` is empty, the probability that the draft at a position is accepted if those before it
    # were; otherwise the share of steps in which at least 1, 2, ..., k drafts are accepted.
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
    >>> from backends.calibration.calibration import load_calibration
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
    rates = acceptance.by_position
    rates = (*rates, *[rates[-1]] * (k - len(rates)))[:k]  # the last one holds for further positions
    progress = acceptance.progress
    return DraftProfile(
        rates,
        request_spread=acceptance.request_spread,
        factor=calibration.temperature.factor(temperature),
        confidence_window=acceptance.confidence_window or 0.0,
        progress=(progress.output_tokens, progress.logit_shifts) if progress else ((), ()),
    )
