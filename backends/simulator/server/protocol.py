"""Request bodies as vLLM accepts them, and its error messages.

Fields without effect on a simulation are accepted and ignored, as are unknown ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError


class RequestError(Exception):
    """A request that vLLM refuses.

    Examples
    --------
    >>> RequestError("top_k is too large", "top_k").body()
    {'error': {'message': 'top_k is too large', 'type': 'BadRequestError', 'param': 'top_k', 'code': 400}}
    """

    def __init__(
        self, message: str, param: str | None = None, *, kind: str = "BadRequestError", code: int = 400
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # name of the invalid field, if it is a single one
        # The error's `type`: `BadRequestError`, `NotFoundError`, `Bad Request`, `Service Unavailable` .
        self.kind = kind
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def messages_body(self) -> dict[str, Any]:
        """Return the error in the format of the messages API."""
        return {"type": "error", "error": {"type": self.kind, "message": self.message}}


class WrongValueError(RequestError):
    """A field has a value that vLLM refuses."""

    def __init__(self, message: str, field: str, value: object) -> None:
        super().__init__(f"{message} (parameter={field}, value={value})", field)


def unauthorized() -> RequestError:
    """Return the error for a missing or wrong API key."""
    return RequestError("Unauthorized", kind="Unauthorized", code=401)


def busy() -> RequestError:
    """Return the error for a full queue."""
    return RequestError(
        "The engine is currently busy and cannot accept new requests. "
        "Please try again later or on a different instance.",
        kind="Service Unavailable",
        code=503,
    )


class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """Options for the usage in a stream."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class SampledBody(Body):
    """Fields common to all requests for text."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = 1
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None


class ChatBody(SampledBody):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    echo: bool = False


class CompletionBody(SampledBody):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False


class TokenizeBody(Body):
    """`POST /tokenize`, for a text or a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: list[int]


B = TypeVar("B", bound=BaseModel)


def read_json(content_type: str, body: bytes) -> Any:
    """Return the JSON of a request."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise RequestError(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", kind="Bad Request"
        )
    if not body:
        raise _invalid([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(body)  # accepts NaN, and reports the position of an error
    except UnicodeDecodeError as error:
        raise RequestError("There was an error parsing the body", kind="Bad Request") from error
    except json.JSONDecodeError as error:
        wrong = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}}
        raise _invalid([wrong | {"ctx": {"error": error.msg}}]) from error


def validate(shape: type[B], value: Any) -> B:
    """Return the body of a request as `shape`."""
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        raise _invalid(
            [{**wrong, "loc": ("body", *wrong["loc"])} for wrong in error.errors(include_url=False)]
        ) from error


def _invalid(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    lines = []
    for error in errors:
        shown = {
            "type": error["type"],
            "loc": ".".join(str(part) for part in error["loc"]),
            "msg": error["msg"],
            "input": _shown(error["input"]),
        }
        if "ctx" in error:
            shown["ctx"] = {key: str(value) for key, value in error["ctx"].items()}
        lines.append(f"  {shown}")
    plural = "s" if len(errors) > 1 else ""
    first = ".".join(str(part) for part in errors[0]["loc"])
    return RequestError(f"{len(errors)} validation error{plural}:\n" + "\n".join(lines), first, kind="Bad Request")


def _shown(value: object) -> object:
    if isinstance(value, Mapping):
        return f"<dict of {len(value)} items>"
    if isinstance(value, list):
        return f"<list of {len(value)} items>"
    return value


def check_sampling(body: SampledBody, *, speculating: bool) -> None:
    """Check the sampling parameters as vLLM does."""
    if body.stream_options is not None and not body.stream:
        raise RequestError(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)", "stream_options"
        )
    n = 1 if body.n is None else body.n
    if n < 1:
        raise WrongValueError(f"n must be at least 1, got {n}.", "n", n)
    if body.temperature is not None and body.temperature < 0:
        temperature = body.temperature
        raise WrongValueError(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    if n > 1 and body.temperature == 0:
        raise RequestError(f"n must be 1 when using greedy sampling, got {n}.")
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise WrongValueError(f"top_p must be in (0, 1], got {body.top_p}.", "top_p", body.top_p)
    if body.top_k is not None and body.top_k < -1:
        raise WrongValueError(f"top_k must be 0 (disable), or at least 1, got {body.top_k}.", "top_k", body.top_k)
    if body.min_p is not None and not 0 <= body.min_p <= 1:
        raise WrongValueError(f"min_p must be in [0, 1], got {body.min_p}.", "min_p", body.min_p)
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(body, name)
        if penalty is not None and not -2 <= penalty <= 2:
            raise WrongValueError(f"{name} must be in [-2, 2], got {penalty}.", name, penalty)
    if body.repetition_penalty is not None and body.repetition_penalty <= 0:
        penalty = body.repetition_penalty
        raise WrongValueError(
            f"repetition_penalty must be greater than zero, got {penalty}.", "repetition_penalty", penalty
        )
    if body.min_tokens < 0:
        raise RequestError(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.")
    if speculating and (body.logit_bias or (body.min_p or 0) > 1e-5):
        raise RequestError(
            "The min_p and logit_bias sampling parameters are not yet supported with speculative decoding."
        )


def token_limit(asked: int | None, prompt_tokens: int, max_model_len: int, *, at_least: int = 1) -> int:
    """Return the largest number of tokens of an answer: `asked`, or the rest of the context.

    Examples
    --------
    >>> token_limit(100, prompt_tokens=30, max_model_len=120)
    90
    """
    if asked is not None and asked > max_model_len:
        raise WrongValueError(
            f"max_tokens={asked} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            "max_tokens",
            asked,
        )
    if prompt_tokens >= max_model_len:
        raise WrongValueError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
            f"{max_model_len + 1} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
            max_model_len + 1,
        )
    if asked is not None and asked < at_least:
        raise WrongValueError(f"max_tokens must be at least 1, got {asked}.", "max_tokens", asked)
    left = max_model_len - prompt_tokens
    return left if asked is None else min(asked, left)
