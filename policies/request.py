"""What a request tells before it is sent: the features that policies decide on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Endpoint(StrEnum):
    """Which of vLLM's APIs a request speaks."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class RequestFeatures:
    """One request as policies see it.

    Parameters
    ----------
    model
        The name the client asked for.
    temperature
        As sent; the model's default where the request has none.
    overlap
        Share of the prompt's word 3-grams that occur earlier in the prompt, 0 to 1.
    code_share
        Share of the prompt's lines that look like source code, 0 to 1.
    prompt_tokens
        Exact where the prompt came as token ids, else estimated from its length.
    max_tokens
        The request's limit on output tokens; None where it has none.
    template
        Eight hex digits that stand for what requests of one application share (the system prompt or the head of
        the prompt); empty where there is nothing to tell it by.
    turns
        Messages in the conversation; 1 for a bare prompt.
    baseline_only
        The parameters present that no speculating vLLM serves (`min_p`, `logit_bias`); empty for most.
    qps, in_flight
        Load of the model when the request arrived: arrivals per second over the last seconds, and requests under way.
    """

    model: str
    endpoint: Endpoint
    stream: bool = False
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    overlap: float = 0.0
    code_share: float = 0.0
    prompt_tokens: int = 0
    max_tokens: int | None = None
    template: str = ""
    turns: int = 1
    structured: bool = False
    tools: bool = False
    baseline_only: tuple[str, ...] = ()
    qps: float = 0.0
    in_flight: int = 0
