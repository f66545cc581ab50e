"""Predictions of which only the work matters."""

from __future__ import annotations

from policies.learned.models.backend_model import Prediction


def work(steps: float, context_tokens: float, prompt_tokens: float, prefill_s: float = 0.0) -> Prediction:
    """Return the prediction of a request that adds this work to its backend."""
    prompts = prompt_tokens, 0, 0.0, prefill_s, prompt_tokens
    return Prediction(0.0, 0.0, 0.0, 0.0, steps, 1.0, steps, context_tokens, *prompts)
