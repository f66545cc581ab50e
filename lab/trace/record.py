"""The trace record: one request, its arrival, its outcome and its acceptance by speculation method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.rooms.recorder.schema import Hashing

BLOCK_TOKENS = 512
"""Tokens per block of `TraceRecord.prefix_blocks`, as in Mooncake's traces."""

LARGEST_BLOCK = 2**63 - 1
"""Bits of a block's number that count; other programs' hashes may have one more."""


@dataclass(frozen=True, slots=True)
class SpeculationRecord:
    """The engine's report of its speculation on one request; None for values it did not report.

    Parameters
    ----------
    drafting_steps
        Number of steps with a draft.
    tokens_per_step
        Output tokens per engine step (accepted + 1); derived from the chunks of the stream if not reported.
    """

    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    drafting_steps: int | None = None
    tokens_per_step: float | None = None


class Text(NamedTuple):
    """A text as proposers read it: equal numbers stand for equal tokens or equal n-grams."""

    prompt: Sequence[int]
    output: Sequence[int]
    exact: bool


# Not frozen, as construction would take twice as long. Treat it as immutable nevertheless.
@dataclass(slots=True)
class TraceRecord:
    """One request of a trace. Unknown values are None or empty; docs/replay.md describes the file format.

    Parameters
    ----------
    id
        Id, unique in its file; the line number in traces without ids.
    arrived_at
        Arrival time in seconds since 1970 or any other origin; None in traces without times.
    key
        Name of the API key, not the key itself.
    session
        Id shared by the requests of one conversation.
    think_time_s
        Seconds from the end of the previous answer in its session to this request; None if it does not wait for an
        answer.
    n
        Number of sequences requested.
    temperature, top_p
        Sampling parameters; the recorder fills in the model's default.
    max_tokens
        Limit on the output length.
    prompt_tokens
        Prompt length; if only the text is known, a tokenizer's count or a quarter of its UTF-8 bytes.
    output_tokens
        Output length; None if neither it nor the output is known.
    estimated
        Whether output_tokens is the gateway's estimate, as the engine did not report it.
    overlap, code_share, turns, structured, tools, thinking, baseline_only, qps, in_flight
        As in `policies.features.request.RequestFeatures`.
    policy, reason, propensity, arm
        The decision for `backend`: its policy, its reason, the probability of this choice, and the request's arm in a
        comparison.
    retried_from
        Backend on which the request failed first.
    rescued_from, rescued_at
        Backend that began a stream completed by `backend`; tokens of the answer at that time.
    candidates
        Backends that the decision chose among, in columns: a list of names, and one list per known value.
    status
        HTTP status of the client's response.
    error
        Kind of failure; empty for success.
    ttft_s, e2e_s
        Seconds from arrival to the first chunk and to the end.
    itl
        Seconds between consecutive chunks of the stream.
    queue_s
        Seconds in the engine's queue, as reported by the engine.
    waited_s
        Seconds in the gateway's queue before it was sent; the other times exclude them.
    spec
        The engine's report of its speculation.
    acceptance
        By method: tokens emitted by a step that starts at output position 0, 1, ...; or, as one number, the mean
        acceptance length (output tokens per step).
    prompt_token_ids, output_token_ids
        Token ids in the model's vocabulary.
    prompt, messages, output
        The texts; `messages` as in the chat API.
    prompt_hashes, output_hashes, hashing
        Salted hashes of the text, and how they were computed.
    prefix_blocks
        One number per block of `block_tokens` tokens at the start of the prompt. It identifies the block and everything
        before it, so requests with equal numbers share a cached prefix.

    Examples
    --------
    >>> record = TraceRecord(arrived_at=10.0, ttft_s=0.5, e2e_s=2.5, output_tokens=11)
    >>> record.ended_at, record.tpot_s
    (12.5, 0.2)
    """

    id: str = ""
    arrived_at: float | None = None
    model: str = ""
    endpoint: str = ""
    key: str = ""
    session: str = ""
    think_time_s: float | None = None
    template: str = ""
    workload: str = ""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    n: int = 1
    stream: bool | None = None
    prompt_tokens: int = 0
    output_tokens: int | None = None
    cached_tokens: int | None = None
    turns: int | None = None
    overlap: float | None = None
    code_share: float | None = None
    structured: bool | None = None
    estimated: bool | None = None
    tools: bool | None = None
    thinking: bool | None = None
    baseline_only: Sequence[str] = ()
    qps: float | None = None
    in_flight: int | None = None
    policy: str = ""
    reason: str = ""
    backend: str = ""
    method: str = ""
    propensity: float | None = None
    arm: str = ""
    retried_from: str = ""
    rescued_from: str = ""
    rescued_at: int | None = None
    candidates: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    status: int | None = None
    error: str = ""
    ttft_s: float | None = None
    itl: Sequence[float] = ()
    e2e_s: float | None = None
    queue_s: float | None = None
    waited_s: float | None = None
    spec: SpeculationRecord | None = None
    acceptance: Mapping[str, Sequence[int] | float] = field(default_factory=dict)
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    prompt: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    output: str = ""
    prompt_hashes: Sequence[int] = ()
    output_hashes: Sequence[int] = ()
    hashing: Hashing | None = None
    prefix_blocks: Sequence[int] = ()
    block_tokens: int = BLOCK_TOKENS

    @property
    def ended_at(self) -> float | None:
        """Time at which the request ended, on the clock of `arrived_at`."""
        return None if self.arrived_at is None or self.e2e_s is None else self.arrived_at + self.e2e_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None without times or without a second token."""
        if self.ttft_s is None or self.e2e_s is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def tokens_per_step(self) -> float | None:
        """Output tokens per engine step, as reported; None if not reported."""
        return None if self.spec is None else self.spec.tokens_per_step

    @property
    def share_cached(self) -> float | None:
        """Share of the prompt found in a prefix cache; None if unknown."""
        cached = self.cached_tokens
        return None if cached is None or not self.prompt_tokens else cached / self.prompt_tokens

    @property
    def text(self) -> Text | None:
        """Prompt and output as numbers that proposers can run on; None if the output has neither ids nor hashes.

        They are `exact` if they are token ids or hashes of single tokens. Hashes of words or n-grams are not: in them,
        n-gram drafting with a shorter n finds fewer matches than in the text.
        """
        if self.output_token_ids:
            return Text(self.prompt_token_ids, self.output_token_ids, exact=True)
        if self.output_hashes:
            hashing = self.hashing or Hashing()
            exact = hashing.unit == "token" and hashing.ngram == 1
            return Text(self.prompt_hashes, self.output_hashes, exact)
        return None
