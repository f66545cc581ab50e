"""Requests that a simulated replica understands, and its errors in vLLM's words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from backends.simulator.engine.state import UNCUT


class InvalidRequestError(Exception):
    """A request that the replica cannot serve.

    Examples
    --------
    >>> InvalidRequestError("no such thing", "top_k").body()
    {'error': {'message': 'no such thing', 'type': 'BadRequestError', 'param': 'top_k', 'code': 400}}
    """

    def __init__(
        self, message: str, param: str | None = None, *, kind: str = "BadRequestError", code: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param  # name of the invalid field, if it is only one
        self.kind = kind
        self.code = code  # HTTP status

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class Body(BaseModel):
    """A request's body; unknown fields are ignored."""

    model_config = ConfigDict(protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """Options for the usage in a stream."""

    include_usage: bool | None = False


_GREEDY = 1e-5
"""Temperature below which sampling is greedy."""

Xargs = dict[str, str | int | float | list[str | int | float]]
"""Parameters of extensions."""


class TextBody(Body):
    """Fields common to all requests for text."""

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    logit_bias: dict[str, float] | None = None
    n: int = Field(1, ge=1, le=128)
    seed: int | None = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    vllm_xargs: Xargs | None = None

    def check(self, temperature: float) -> None:
        """Reject what vLLM rejects once it knows the temperature, in its words."""
        if self.stream_options is not None and self.stream_options.model_fields_set and not self.stream:
            raise InvalidRequestError("Stream options can only be defined when `stream=True`.", "stream_options")
        if "" in ([self.stop] if isinstance(self.stop, str) else self.stop or ()):
            raise InvalidRequestError("stop cannot contain an empty string.")
        if self.n > 1 and temperature < _GREEDY:
            raise InvalidRequestError(f"n must be 1 when using greedy sampling, got {self.n}.")

    @property
    def depth(self) -> int:
        """Most of its draft tokens that a step may verify, on an engine with `deploy/vllm_draft_depth`."""
        asked = (self.vllm_xargs or {}).get("draft_tokens")
        return min(asked, UNCUT) if isinstance(asked, int) and asked >= 0 else UNCUT

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(TextBody):
    """`POST /v1/chat/completions`."""

    n: Annotated[int, BeforeValidator(lambda given: 1 if given is None else given)] = Field(1, ge=1, le=128)
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None


class CompletionBody(TextBody):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]] = Field(min_length=1)
    max_tokens: Annotated[int, BeforeValidator(lambda given: 16 if given is None else given)] = Field(16, ge=1)


class TokenizeBody(Body):
    """`POST /tokenize`, for a text or a conversation."""

    prompt: str = ""
    messages: list[dict[str, Any]] | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: list[int]


def token_limit(asked: int | None, prompt_tokens: int, max_model_len: int) -> int:
    """Return the most tokens that an answer may have: `asked`, or the rest of the context.

    Examples
    --------
    >>> token_limit(100, prompt_tokens=30, max_model_len=120)
    90
    """
    if asked is not None and asked > max_model_len:
        raise InvalidRequestError(
            f"max_tokens={asked} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            "max_tokens",
        )
    if prompt_tokens >= max_model_len:
        raise InvalidRequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
            f"{max_model_len + 1} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
        )
    left = max_model_len - prompt_tokens
    return left if asked is None else min(asked, left)
