"""What a request tells before it is sent: the features that policies decide on."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

from policies.features import template
from policies.features.code_share import code_share
from policies.features.overlap import overlap_of_ids, overlap_of_text
from policies.features.prompt import Prompt, beginnings, read_prompt

MIN_P_EPSILON: Final = 1e-5
"""vLLM's own bound (`_SAMPLING_EPS`): a `min_p` up to it is as good as none, and a speculating server takes it."""

TEXT_FEATURES: Final = frozenset({"overlap", "code_share", "template", "prefix"})
"""The features that cost a look at the prompt's text: more than all others together."""

COMPLETIONS_MAX_TOKENS: Final = 16
"""What vLLM, as OpenAI, takes for a completion that sends no `max_tokens`."""

WORKLOAD: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")
"""The names of workloads that count when declared."""

_TOOL_FORCED: Final = ("required", "function", "any", "tool")
_LARGEST: Final = 2**31 - 1
_GUIDED: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_SELDOM_SENT: Final = frozenset(
    {"tools", "functions", "structured_outputs", "response_format", "text", "output_config", "min_p", "logit_bias"}
).union(_GUIDED)
"""Fields that most requests have none of: one look at them all saves a look at each."""


class Endpoint(StrEnum):
    """Which of vLLM's APIs a request speaks."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    OTHER = "other"


_COMPLETIONS: Final = Endpoint.COMPLETIONS  # a member of an enum is looked up anew each time


# Not frozen: that would make each of the fields cost a call to set, 2 us a request. Nobody changes one all the same.
@dataclass(slots=True, init=False, unsafe_hash=True)
class RequestFeatures:
    """One request as policies see it.

    Parameters
    ----------
    model
        The name the client asked for.
    n
        Sequences that the request asks for: `n`, times the prompts where it brings several.
    temperature
        As sent; the model's default where the request has none.
    overlap
        Share of the prompt's runs of 16 bytes (of 3 ids, where it came as token ids) that occur earlier in it, 0 to 1,
        over its last 1,024 bytes (256 ids).
    code_share
        Share of the prompt's lines that begin like source code, 0 to 1, over its last 1,024 characters.
    prompt_tokens
        Exact where the prompt came as token ids, else estimated from its length.
    max_tokens
        The request's limit on output tokens, for each sequence; None where it has none. A completion that names none
        has 16, as vLLM has it.
    template
        Eight hex digits that stand for what requests of one application share (the system prompt or the head of
        the prompt); empty where there is nothing to tell it by.
    turns
        Messages in the conversation but for the system prompt; 1 for a bare prompt.
    structured
        The answer is bound to a grammar: a JSON schema, a regular expression, a choice, a tool that must be called.
    tools
        The request offers tools and lets the model call them.
    baseline_only
        The parameters present that no speculating vLLM serves (`min_p`, `logit_bias`); empty for most.
    qps, in_flight
        Load of the model when the request arrived: arrivals per second over the last seconds, and requests under way.
    workload
        What the client declares in the header `x-gateway-workload`, in lower case; empty where it declares nothing,
        or nothing that is a name (letters, digits, `.`, `_`, `-`; at most 40).
    explore
        Whether it may be used to learn; a client forbids it with `x-gateway-explore: no`.
    slo_ttft_s, slo_tpot_s
        What the client or its key asks for: seconds to the first token, and per output token; None for nothing.
    prefix
        Hashes of the beginnings of the prompt, each longer than the one before, by which a prefix cache may know it.
    prefix_tokens
        How many tokens each of those beginnings has.
    """

    model: str
    endpoint: Endpoint
    stream: bool
    n: int
    temperature: float
    top_p: float
    overlap: float
    code_share: float
    prompt_tokens: int
    max_tokens: int | None
    template: str
    turns: int
    structured: bool
    tools: bool
    baseline_only: tuple[str, ...]
    qps: float
    in_flight: int
    workload: str
    explore: bool
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    prefix: tuple[int, ...]
    prefix_tokens: tuple[int, ...]

    def __init__(  # noqa: PLR0917 -- a record; written out, as a compiled class makes it in a fifth of the time so
        self,
        model: str,
        endpoint: Endpoint,
        stream: bool = False,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        overlap: float = 0.0,
        code_share: float = 0.0,
        prompt_tokens: int = 0,
        max_tokens: int | None = None,
        template: str = "",
        turns: int = 1,
        structured: bool = False,
        tools: bool = False,
        baseline_only: tuple[str, ...] = (),
        qps: float = 0.0,
        in_flight: int = 0,
        workload: str = "",
        explore: bool = True,
        slo_ttft_s: float | None = None,
        slo_tpot_s: float | None = None,
        prefix: tuple[int, ...] = (),
        prefix_tokens: tuple[int, ...] = (),
    ) -> None:
        self.model = model
        self.endpoint = endpoint
        self.stream = stream
        self.n = n
        self.temperature = temperature
        self.top_p = top_p
        self.overlap = overlap
        self.code_share = code_share
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.template = template
        self.turns = turns
        self.structured = structured
        self.tools = tools
        self.baseline_only = baseline_only
        self.qps = qps
        self.in_flight = in_flight
        self.workload = workload
        self.explore = explore
        self.slo_ttft_s = slo_ttft_s
        self.slo_tpot_s = slo_tpot_s
        self.prefix = prefix
        self.prefix_tokens = prefix_tokens

    def __reduce__(self) -> tuple[type[RequestFeatures], tuple[Any, ...]]:
        """Take it apart for pickling, which a compiled class leaves to itself."""
        return RequestFeatures, tuple([getattr(self, one.name) for one in fields(self)])


ANY_REQUEST: Final = RequestFeatures("", Endpoint.OTHER)
"""What policies are shown that do not look at requests."""


def describe(
    endpoint: Endpoint,
    body: dict[str, Any],
    *,
    model: str,
    default_temperature: float,
    qps: float,
    in_flight: int,
    workload: str = "",
    text_features: Collection[str] = TEXT_FEATURES,
    prompt: Prompt | None = None,
) -> RequestFeatures:
    """Describe a request from its parsed body.

    Never raises on JSON of any shape: the engine judges validity, and a field that makes no sense counts as absent.
    Cost is bounded by the number of messages, not their length (`python -m benchmarks.describe` measures it).

    Parameters
    ----------
    default_temperature
        What the model takes where a request sends none (its generation config, usually).
    qps, in_flight, workload
        As in `RequestFeatures`; `workload` is the header's value as it came.
    text_features
        Those of `TEXT_FEATURES` that are wanted; the others are left at their defaults.
    prompt
        What `read_prompt` finds in the body, from whoever wants it besides.
    """
    if prompt is None:
        prompt = read_prompt(body)
    tail = prompt.tail() if text_features else ""
    temperature = _number(body.get("temperature"))
    top_p = _number(body.get("top_p"))
    structured = tools = False
    only: tuple[str, ...] = ()
    if not _SELDOM_SENT.isdisjoint(body):
        tool_choice = _tool_choice(body.get("tool_choice"))
        tools = bool(body.get("tools") or body.get("functions")) and tool_choice != "none"
        structured = _structured(body) or (tools and tool_choice in _TOOL_FORCED)
        only = baseline_only(body)
    prefix, prefix_tokens = beginnings(prompt) if "prefix" in text_features else ((), ())
    return RequestFeatures(
        model=model,
        endpoint=endpoint,
        stream=body.get("stream") is True,
        n=min(_LARGEST, max(1, _count(body.get("n")) or 1) * prompt.batch),
        temperature=default_temperature if temperature is None else max(0.0, temperature),
        top_p=1.0 if top_p is None else top_p,
        overlap=_overlap(prompt, tail) if "overlap" in text_features else 0.0,
        code_share=code_share(tail) if "code_share" in text_features else 0.0,
        prompt_tokens=prompt.tokens,
        max_tokens=_max_tokens(endpoint, body),
        template=_template(prompt) if "template" in text_features else "",
        turns=prompt.turns,
        structured=structured,
        tools=tools,
        baseline_only=only,
        qps=qps,
        in_flight=in_flight,
        workload=_declared(workload) if workload else "",
        prefix=prefix,
        prefix_tokens=prefix_tokens,
    )


def _overlap(prompt: Prompt, tail: str) -> float:
    return overlap_of_text(tail) if tail else overlap_of_ids(prompt.ids)


def _template(prompt: Prompt) -> str:
    if prompt.system:
        return template.of_system_prompt(prompt.system[0])
    if prompt.pieces:
        return template.of_prompt(prompt.pieces[0])
    return template.of_token_ids(prompt.ids)


def _max_tokens(endpoint: Endpoint, body: dict[str, Any]) -> int | None:
    for key in ("max_completion_tokens", "max_tokens", "max_output_tokens"):  # in the order in which vLLM looks
        if (limit := _count(body.get(key))) is not None:
            return limit
    return COMPLETIONS_MAX_TOKENS if endpoint is _COMPLETIONS and "max_tokens" not in body else None


def baseline_only(body: dict[str, Any]) -> tuple[str, ...]:
    """Return the parameters of a request that no speculating vLLM serves."""
    if "min_p" not in body and "logit_bias" not in body:
        return ()
    min_p = _number(body.get("min_p"))
    bound = min_p is not None and min_p > MIN_P_EPSILON
    biased = bool(body.get("logit_bias"))
    if not bound and not biased:
        return ()
    return (("min_p",) if bound else ()) + (("logit_bias",) if biased else ())


def _structured(body: dict[str, Any]) -> bool:
    if body.get("structured_outputs"):
        return True
    if _is_format(body.get("response_format")):
        return True
    for key in ("text", "output_config"):  # of the responses, and of Anthropic's messages
        if isinstance(settings := body.get(key), dict) and _is_format(settings.get("format")):
            return True
    # vLLM before 0.12 has these beside each other; an empty choice or schema is none.
    return any(body.get(key) for key in _GUIDED)


def _is_format(value: object) -> bool:
    return isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "text"


def _tool_choice(choice: object) -> object:
    """Return the word of a tool choice: OpenAI's as it stands or a tool by name, Anthropic's wrapped in a mapping."""
    return choice.get("type") if isinstance(choice, dict) else choice


def _declared(workload: str) -> str:
    name = workload.strip().lower()
    return name if WORKLOAD.fullmatch(name) else ""


def _number(value: object) -> float | None:
    """Return a finite number, from a string too, as vLLM's own validation would; else None."""
    if value is None:
        return None
    if isinstance(value, float):
        number = value
    elif isinstance(value, int) or (isinstance(value, str) and len(value) <= 32):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return None
    else:
        return None
    return None if math.isnan(number) or math.isinf(number) else number


def _count(value: object) -> int | None:
    number = _number(value)
    if number is None:
        return None
    return _LARGEST if number > _LARGEST else int(number) if number > 0.0 else 0
