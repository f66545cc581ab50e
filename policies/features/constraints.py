"""Constraints that the parameters of a request put on engines and models."""

from __future__ import annotations

from typing import Any, Final

from backends.speculation import MIN_P_EPSILON
from policies.features.values import number

FATAL: Final = ("logprob_token_ids", "label_token_ids")
"""Log-probabilities of given tokens: a speculating vLLM 0.32 answers 500, and `/generative_scoring` ends it."""
EXCLUDING: Final = ("allowed_token_ids", "bad_words", "logit_bias", "logits_processors")
"""Parameters that exclude tokens, and so make the model reject drafts, since the drafter ignores them."""
PENALTIES: Final = {
    "presence_penalty": (0.0, 0.5),
    "frequency_penalty": (0.0, 0.1),
    "repetition_penalty": (1.0, 0.051),
}
"""Penalties on repeated tokens: the neutral value, and the distance from it with little effect."""
_NARROW: Final = frozenset({"choice", "regex", "grammar", "structural_tag"})
"""Structured outputs that may leave the model no choice; a schema leaves the texts open, a JSON object nearly all."""


def baseline_only(body: dict[str, Any]) -> tuple[str, ...]:
    """Return the parameters of a request that a speculating vLLM rejects, or fails at.

    Examples
    --------
    >>> baseline_only({"min_p": 0.1, "temperature": 0.5})
    ('min_p',)
    """
    min_p = number(body.get("min_p"))
    bound = ("min_p",) if min_p is not None and min_p > MIN_P_EPSILON else ()
    return (*bound, *(name for name in ("logit_bias", *FATAL) if body.get(name)))


def is_restricted(body: dict[str, Any]) -> bool:
    """Return whether the parameters of a request exclude tokens that the model would otherwise emit."""
    if any(body.get(key) for key in EXCLUDING):
        return True
    for key, (plain, little) in PENALTIES.items():
        if key in body and (value := number(body[key])) is not None and abs(value - plain) > little:
            return True
    outputs, formatted = body.get("structured_outputs"), body.get("response_format")
    return (
        (isinstance(outputs, dict) and any(outputs.get(key) for key in _NARROW))
        or any(body.get(f"guided_{key}") for key in _NARROW)
        or (isinstance(formatted, dict) and str(formatted.get("type")) in _NARROW)
    )
