"""Requests that a simulated replica understands, and its errors in vLLM's words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from backends.simulator.engine.state import UNCUT

WRONG_BODY = "Bad Request"
"""Kind of the errors about a body's form."""

_BRANCHES = frozenset({"str", "int", "float", "bool", "dict", "list"})
_MOST_ERRORS, _MOST_INPUT = 10, 200


class InvalidRequestError(Exception):
    """A request that the replica cannot serve.

    Examples
    --------
    >>> error = InvalidRequestError("top_p must be in (0, 1], got 2.0.", "top_p", 2.0)
    >>> error.body()["error"]["message"]
    'top_p must be in (0, 1], got 2.0. (parameter=top_p, value=2.0)'
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        value: object = None,
        *,
        kind: str = "BadRequestError",
        code: int = 400,
    ) -> None:
        details = [f"{name}={given}" for name, given in (("parameter", param), ("value", value)) if given is not None]
        super().__init__(f"{message} ({', '.join(details)})" if kind == "BadRequestError" and details else message)
        self.param = param  # name of the invalid field, if it is only one
        self.kind = kind
        self.code = code  # HTTP status

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the error in Anthropic's format."""
        return {"type": "error", "error": {"type": self.kind, "message": str(self)}}


Rule = tuple[bool, str] | tuple[bool, str, str] | tuple[bool, str, str, object]
"""Whether a request is wrong, why, and if vLLM names them the field and its value."""


def _reject(rules: Iterable[Rule]) -> None:
    for is_wrong, message, *place in rules:
        if is_wrong:
            raise InvalidRequestError(message, *place)


def wrong_body(errors: Sequence[Mapping[str, Any]]) -> InvalidRequestError:
    """Return the error of a body with wrong fields, which Pydantic found.

    Examples
    --------
    >>> error = wrong_body([{"type": "missing", "loc": ("messages",), "msg": "Field required", "input": {"n": 1}}])
    >>> print(error)
    1 validation error:
      {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', 'input': '<dict of 1 items>'}
    >>> error.param
    'body.messages'
    """
    shown = [_shown(error) for error in errors[:_MOST_ERRORS]]
    more = f"\n  ...and {len(errors) - _MOST_ERRORS} more errors" if len(errors) > _MOST_ERRORS else ""
    listed = "".join(f"\n  {each}" for each in shown)
    plural = "s" if len(errors) > 1 else ""
    message = f"{len(errors)} validation error{plural}:{listed}{more}"
    return InvalidRequestError(message, shown[0]["loc"], kind=WRONG_BODY)


def _shown(error: Mapping[str, Any]) -> dict[str, Any]:
    given, place = error["input"], [str(part) for part in error["loc"]]
    if isinstance(given, (list, dict)):
        given = f"<{type(given).__name__} of {len(given)} items>"
    fields = [part for part in place if part not in _BRANCHES and not part.endswith("]")]  # no branches of a union
    return {**error, "loc": ".".join(("body", *fields)), "input": str(given)[:_MOST_INPUT]}


class Body(BaseModel):
    """A request's body; unknown fields are ignored."""

    model_config = ConfigDict(protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """Options for the usage in a stream."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


_MOST_CHOICES = 16384
"""`VLLM_MAX_N_SEQUENCES`."""

Xargs = dict[str, str | int | float | list[str | int | float]]
"""Parameters of extensions."""


class TextBody(Body):
    """Fields common to all requests for text."""

    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int = 1
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    vllm_xargs: Xargs | None = None

    def check(self, temperature: float) -> None:
        """Reject what vLLM rejects once it knows the temperature, in its words."""
        _reject(self.rules(temperature))

    def rules(self, temperature: float) -> Iterator[Rule]:
        """Yield what vLLM rejects."""
        top_p, min_p, n = 1.0 if self.top_p is None else self.top_p, self.min_p or 0.0, self.n
        options, at_temperature = self.stream_options, ("temperature", temperature)
        without_stream = options is not None and bool(options.model_fields_set) and not self.stream
        yield without_stream, "Stream options can only be defined when `stream=True`.", "stream_options"
        yield n < 1, f"n must be at least 1, got {n}."
        yield (
            n > _MOST_CHOICES,
            f"n must be at most {_MOST_CHOICES}, got {n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES "
            "environment variable.",
        )
        yield temperature < 0.0, f"temperature must be non-negative, got {temperature}.", *at_temperature
        yield temperature > 2.0, f"temperature must be in [0, 2], got {temperature}.", *at_temperature
        yield not 0.0 < top_p <= 1.0, f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p
        yield not 0.0 <= min_p <= 1.0, f"min_p must be in [0, 1], got {min_p}."
        yield self.min_tokens < 0, f"min_tokens must be greater than or equal to 0, got {self.min_tokens}."
        yield "" in self.stops, "stop cannot contain an empty string."
        yield n > 1 and not temperature, f"n must be 1 when using greedy sampling, got {n}."

    def limit(self, prompt_tokens: int, max_model_len: int) -> int:
        """Return the most tokens that the answer may have: what it asks for, or the rest of the context.

        Examples
        --------
        >>> TextBody(max_tokens=100).limit(prompt_tokens=30, max_model_len=120)
        90
        """
        asked, param = self.asked_tokens
        left, least = max_model_len - prompt_tokens, self.min_tokens
        limit = left if asked is None else min(asked, left)
        too_many = f"{param}={asked} cannot be greater than max_model_len={max_model_len}. "
        too_long = (  # vLLM cuts a longer text to one token more
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains at least "
            f"{max_model_len + 1} input tokens, which exceeds this limit even without any output tokens. "
        )
        wrong: list[Rule] = [
            ((asked or 0) > max_model_len, too_many + "Please request fewer output tokens.", param, asked),
            (left < 0, too_long + "Please reduce the length of the input prompt.", "input_tokens", max_model_len + 1),
            (limit < 1, f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit),
            (least > limit, f"min_tokens must be less than or equal to max_tokens={limit}, got {least}."),
        ]
        _reject(wrong)
        return limit

    @property
    def asked_tokens(self) -> tuple[int | None, str]:
        """The most tokens that it asks for, and the name of the field that says so."""
        return self.max_tokens, "max_tokens"

    @property
    def stops(self) -> list[str]:
        """Its stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def depth(self) -> int:
        """Most of its draft tokens that a step may verify, on an engine with `deploy/vllm_draft_depth`."""
        asked = (self.vllm_xargs or {}).get("draft_tokens")
        return min(asked, UNCUT) if isinstance(asked, int) and asked >= 0 else UNCUT

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatBody(TextBody):
    """`POST /v1/chat/completions`."""

    n: Annotated[int, BeforeValidator(lambda given: 1 if given is None else given)] = 1
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None

    def rules(self, temperature: float) -> Iterator[Rule]:
        """Yield what vLLM rejects."""
        choice, tools = self.tool_choice, self.tools
        yield not self.messages, "Cannot apply chat template to an empty conversation. Provide at least one message."
        empty = "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely."
        yield tools == [], empty, "tools"
        without_tools = choice not in (None, "none") and tools is None
        yield without_tools, "When using `tool_choice`, `tools` must be set.", "tool_choice"
        names = [(tool.get("function") or {}).get("name") for tool in tools or ()]
        unknown = isinstance(choice, dict) and (choice.get("function") or {}).get("name") not in names
        yield unknown, "The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice"
        yield from super().rules(temperature)

    @property
    def calls(self) -> str | dict[str, Any]:
        """Which tools to call; where the choice is null, rather than left out, none."""
        if not self.tools:
            return "none"
        return self.tool_choice or ("none" if "tool_choice" in self.model_fields_set else "auto")

    @property
    def asked_tokens(self) -> tuple[int | None, str]:
        """The most tokens that it asks for, and the name of the field that says so."""
        if self.max_completion_tokens is None:
            return super().asked_tokens
        return self.max_completion_tokens, "max_completion_tokens"


class CompletionBody(TextBody):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]] = ""
    max_tokens: Annotated[int, BeforeValidator(lambda given: 16 if given is None else given)] = 16

    def rules(self, temperature: float) -> Iterator[Rule]:
        """Yield what vLLM rejects."""
        yield self.prompt == "", "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"
        yield not self.prompt, "You must pass at least one prompt"
        yield from super().rules(temperature)


class TokenizeBody(Body):
    """`POST /tokenize`, for a text or a conversation."""

    prompt: str = ""
    messages: list[dict[str, Any]] | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: list[int]
