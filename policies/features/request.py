"""The features of a request, by which policies decide."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

from policies.features.constraints import EXCLUDING, FATAL, PENALTIES, baseline_only, is_restricted
from policies.features.parts import PartTokens, StoredTokens, Unseen
from policies.features.prompt import (
    RARE_PROMPT_FIELDS,
    Prompt,
    add_rare,
    prefix_hashes,
    read_prompt,
    template_of_prompt,
    template_of_system_prompt,
    template_of_token_ids,
)
from policies.features.shape import GUIDED, LOGPROBS, LONG_TOKENS, forces_tool, offers_tools, shape_of, structure_of
from policies.features.tail import code_share, overlap_of_ids, overlap_of_text
from policies.features.values import LARGEST, count, number

TEXT_FEATURES: Final = frozenset({"overlap", "code_share", "template", "prefix"})
"""Features computed from the prompt's text; together they cost more than all others."""

COMPLETIONS_MAX_TOKENS: Final = 16
"""Default `max_tokens` of the completions API, in vLLM as at OpenAI."""

TYPICAL_TOKENS: Final = 220
"""Assumed length of an unknown answer; Azure's conversation trace of 2023 has a mean of 211 tokens."""

WORKLOAD_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")
"""Valid workload names."""

_THINKING: Final = ("chat_template_kwargs", "reasoning_effort", "thinking", "reasoning")
RARE_FIELDS: Final = frozenset(
    {"tools", "functions", "structured_outputs", "response_format", "text", "output_config", "min_p", *LOGPROBS}
).union(GUIDED, EXCLUDING, FATAL, PENALTIES, _THINKING, RARE_PROMPT_FIELDS)
"""Fields that few requests have; testing for all of them at once is cheaper than one by one."""


class Endpoint(StrEnum):
    """The API of a request."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    OTHER = "other"


_COMPLETIONS: Final = Endpoint.COMPLETIONS  # saves an attribute lookup per request


# Not frozen: setting the fields of a frozen dataclass would take 2 us per request. Treat it as immutable anyway.
@dataclass(slots=True, init=False, unsafe_hash=True)
class RequestFeatures:
    """The features of one request.

    Parameters
    ----------
    model
        Model name that the client requested.
    n
        Number of sequences requested: `n` times the number of prompts.
    temperature
        Sampling temperature, or the model's default if the request has none.
    overlap
        Share of the 16-byte runs that occur earlier, over the last 1,024 bytes of the prompt, 0 to 1. For a prompt of
        token ids, the share of 3-grams over the last 256 ids.
    code_share
        Share of the lines that begin like source code, over the last 1,024 characters of the prompt, 0 to 1.
    prompt_tokens
        Length of the prompt in tokens: exact for token ids, else an estimate. Images and the like count as engines have
        reported for such; until then, a thousand tokens each.
    max_tokens
        Limit on output tokens per sequence; None if there is none. A completion without a limit has 16, as in vLLM.
    template
        Eight hex digits that requests of one application share, from the system prompt or the head of the prompt; empty
        if there is no prompt.
    turns
        Number of messages, without the system prompt; 1 for a bare prompt.
    structured
        Whether the output is constrained: by a JSON schema, regular expression, choice or a mandatory tool call.
    tools
        Whether the request offers tools that the model may call.
    baseline_only
        Parameters of the request that a speculating vLLM rejects (`min_p`, `logit_bias`); usually empty.
    qps
        Requests per second for the model, over the last seconds before the request arrived.
    in_flight
        Requests in flight for the model when the request arrived.
    workload
        Workload declared in the header `x-gateway-workload`, in lower case; empty if there is none, or no valid name.
    slo_ttft_s
        Requested bound on the seconds to the first token, from the client or its key; None for no bound.
    slo_tpot_s
        Requested bound on the seconds per output token; None for no bound.
    prefix
        Hashes of prefixes of the prompt, shortest first, for predicting prefix cache hits.
    prefix_tokens
        Length of each of those prefixes in tokens.
    restricted
        Whether the request's parameters exclude tokens that the model would otherwise emit, so that drafts may be
        rejected through no fault of their drafter.
    client
        Id of the client, derived from its key; empty if it has none.
    overuse
        Ratio of that client's requests in flight to its share of all, at least 1: the factor on the delay of others.
    thinking
        Whether the request enables or disables thinking before the answer; None if it leaves that to the model.
    shape
        Requested features on which engines have been seen to break, see `policies.features.shape`.
    unseen
        Parts of the prompt that its text does not show; None without any.

    Examples
    --------
    >>> request = RequestFeatures("llama", Endpoint.CHAT, temperature=0.2, workload="code", prompt_tokens=120)
    >>> request.temperature, request.workload, request.max_tokens
    (0.2, 'code', None)
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
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    prefix: tuple[int, ...]
    prefix_tokens: tuple[int, ...]
    restricted: bool
    client: str
    thinking: bool | None
    shape: tuple[str, ...]
    overuse: float
    unseen: Unseen | None

    def __init__(  # noqa: PLR0917 -- explicit, because a compiled class is then created five times as fast
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
        slo_ttft_s: float | None = None,
        slo_tpot_s: float | None = None,
        prefix: tuple[int, ...] = (),
        prefix_tokens: tuple[int, ...] = (),
        restricted: bool = False,
        client: str = "",
        thinking: bool | None = None,
        shape: tuple[str, ...] = (),
        overuse: float = 1.0,
        unseen: Unseen | None = None,
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
        self.slo_ttft_s = slo_ttft_s
        self.slo_tpot_s = slo_tpot_s
        self.prefix = prefix
        self.prefix_tokens = prefix_tokens
        self.restricted = restricted
        self.client = client
        self.thinking = thinking
        self.shape = shape
        self.overuse = overuse
        self.unseen = unseen

    def set_apart(self, template: str, prefix: tuple[int, ...]) -> None:
        """Make the request one of an adapter: a separate application, whose prompts are cached separately."""
        self.template, self.prefix = template, prefix

    def set_session(self, session: int) -> None:
        """Treat the prompt as continuing those of a session, which its text does not show."""
        self.prefix, self.prefix_tokens = (session,), (self.prompt_tokens,)

    def demand(self, overuse: float, slo_ttft_s: float | None, slo_tpot_s: float | None) -> None:
        """Set the overuse of the request's client, and the bounds on its times."""
        self.overuse, self.slo_ttft_s, self.slo_tpot_s = overuse, slo_ttft_s, slo_tpot_s

    @property
    def context_tokens(self) -> int:
        """Expected length of the context: the prompt, and an answer of typical length or its limit."""
        limit = self.max_tokens
        return self.prompt_tokens + (TYPICAL_TOKENS if limit is None or limit > TYPICAL_TOKENS else limit)

    @property
    def is_unknown(self) -> bool:
        """Whether the prompt has parts on which engines have reported nothing."""
        return self.unseen is not None and bool(self.unseen.unknown)

    @property
    def most_context_tokens(self) -> int:
        """Greatest length of the context, with the longest answer that the request allows.

        Unknown parts of the prompt may have any length.
        """
        most = max(self.context_tokens, self.prompt_tokens + (self.max_tokens or 0))
        return most if self.unseen is None else most + max(0, self.unseen.most_tokens - self.prompt_tokens)

    def __reduce__(self) -> tuple[type[RequestFeatures], tuple[Any, ...]]:
        """Support pickling, which a compiled class does not provide by itself."""
        return RequestFeatures, tuple([getattr(self, field.name) for field in fields(self)])


ANY_REQUEST: Final = RequestFeatures("", Endpoint.OTHER)
"""The request passed to policies that do not read requests."""


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
    client: str = "",
    parts: PartTokens | None = None,
    stored: StoredTokens | None = None,
) -> RequestFeatures:
    """Return the features of a request, from its parsed body.

    It accepts JSON of any shape: the engine validates requests, and a field of the wrong type counts as absent. The
    cost depends on the number of messages, not on their length.

    Parameters
    ----------
    default_temperature
        Temperature of a request without one, usually from the model's generation config.
    qps, in_flight
        As in `RequestFeatures`.
    workload
        Raw value of the header `x-gateway-workload`.
    text_features
        Subset of `TEXT_FEATURES` to compute; the others keep their defaults.
    prompt
        Result of `read_prompt(body)`, if the caller already has it.
    client
        As in `RequestFeatures`.
    parts, stored
        What is known about the tokens of parts other than text, and of stored conversations.

    Examples
    --------
    >>> body = {"prompt": [1, 2, 3], "temperature": 0}
    >>> features = describe(
    ...     Endpoint.COMPLETIONS, body, model="llama", default_temperature=0.6, qps=0.0, in_flight=0, workload="Code"
    ... )
    >>> features.temperature, features.prompt_tokens, features.max_tokens, features.workload
    (0.0, 3, 16, 'code')
    """
    if prompt is None:
        prompt = read_prompt(body)
    tail = prompt.tail() if text_features else ""
    temperature = number(body.get("temperature"))
    top_p = number(body.get("top_p"))
    structured = tools = restricted = False
    structure = ""
    thinking: bool | None = None
    rejected: tuple[str, ...] = ()
    n = min(LARGEST, max(1, count(body.get("n")) or 1) * prompt.batch)
    has_rare = not RARE_FIELDS.isdisjoint(body)
    if has_rare:
        tools = offers_tools(body)
        structure = structure_of(body)
        structured = bool(structure) or (tools and forces_tool(body))
        rejected = baseline_only(body)
        restricted = is_restricted(body)
        thinking = _thinking(body)
        add_rare(prompt, body, stored)
    shape: tuple[str, ...] = ()
    tokens, unseen, images = prompt.tokens, None, False
    if prompt.parts is not None:
        tokens, unseen = (PartTokens() if parts is None else parts).unseen(prompt.parts, tokens, client)
        images = any(name.startswith("image") for name in prompt.parts)
    if has_rare or n > 1 or images or tokens >= LONG_TOKENS:
        shape = shape_of(body, structure, tools=tools, thinking=thinking, n=n, images=images, tokens=tokens)
    prefix, prefix_tokens = prefix_hashes(prompt) if "prefix" in text_features else ((), ())
    return RequestFeatures(
        model=model,
        endpoint=endpoint,
        stream=body.get("stream") is True,
        n=n,
        temperature=default_temperature if temperature is None else max(0.0, temperature),
        top_p=1.0 if top_p is None else max(0.0, top_p),
        overlap=_overlap(prompt, tail) if "overlap" in text_features else 0.0,
        code_share=code_share(tail) if "code_share" in text_features else 0.0,
        prompt_tokens=tokens,
        max_tokens=_max_tokens(endpoint, body),
        template=_template(prompt) if "template" in text_features else "",
        turns=prompt.turns,
        structured=structured,
        tools=tools,
        baseline_only=rejected,
        qps=qps,
        in_flight=in_flight,
        workload=_declared(workload) if workload else "",
        prefix=prefix,
        prefix_tokens=prefix_tokens,
        restricted=restricted,
        client=client,
        thinking=thinking,
        shape=shape,
        unseen=unseen,
    )


def _thinking(body: dict[str, Any]) -> bool | None:
    """Return whether a request enables thinking, in the form of vLLM's chat templates, OpenAI or Anthropic."""
    if isinstance(said := body.get("chat_template_kwargs"), dict):
        for name in ("enable_thinking", "thinking"):
            if isinstance(asked := said.get(name), bool):
                return asked
    if isinstance(said := body.get("thinking"), dict):
        return said.get("type") != "disabled"
    effort = said.get("effort") if isinstance(said := body.get("reasoning"), dict) else body.get("reasoning_effort")
    return effort != "none" if isinstance(effort, str) else None


def _overlap(prompt: Prompt, tail: str) -> float:
    return overlap_of_text(tail) if tail else overlap_of_ids(prompt.ids)


def _template(prompt: Prompt) -> str:
    if prompt.system:
        return template_of_system_prompt(prompt.system[0])
    if prompt.pieces:
        return template_of_prompt(prompt.pieces[0])
    return template_of_token_ids(prompt.ids)


def _max_tokens(endpoint: Endpoint, body: dict[str, Any]) -> int | None:
    for key in ("max_completion_tokens", "max_tokens", "max_output_tokens"):  # in vLLM's order of precedence
        if (limit := count(body.get(key))) is not None:
            return limit
    return COMPLETIONS_MAX_TOKENS if endpoint is _COMPLETIONS else None


def _declared(workload: str) -> str:
    name = workload.strip().lower()
    return name if WORKLOAD_NAME.fullmatch(name) else ""
