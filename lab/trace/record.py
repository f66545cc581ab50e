"""The trace record: one request, when it came, what became of it, and what is known of how it could be drafted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.recorder.schema import VERSION, Hashing

BLOCK_TOKENS = 512
"""Tokens to a block of `TraceRecord.prefix_blocks`, Mooncake's."""


class TraceCandidate(NamedTuple):
    """One backend that the request could have gone to (a tuple: a trace has several to each of its records).

    Parameters
    ----------
    prediction_s
        Seconds that the policy expected of it; None where it predicts nothing.
    propensity
        Probability with which the policy would have chosen it, 0 to 1; None where it is not known.
    in_flight
        Requests of this gateway that it was working on when the choice was made; None where it is not known.
    running, waiting
        What its engine had last said of its batch and its queue, from all its clients; None where it is not known.
    """

    backend: str
    method: str = ""
    prediction_s: float | None = None
    propensity: float | None = None
    in_flight: int | None = None
    running: int | None = None
    waiting: int | None = None


@dataclass(frozen=True, slots=True)
class Speculation:
    """What the engine said of its own speculation on this request; None for what it did not say.

    Parameters
    ----------
    drafting_steps
        Steps that drafted anything.
    tokens_per_step
        Output tokens per engine step, accepted + 1; if the engine did not report it, from the chunks of the stream.
    """

    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    drafting_steps: int | None = None
    tokens_per_step: float | None = None


class Text(NamedTuple):
    """A text as proposers read it: equal numbers are equal tokens, or equal n-grams of them."""

    prompt: Sequence[int]
    output: Sequence[int]
    exact: bool


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One request of a trace. What a trace does not tell is None or empty; docs/trace.md describes the file.

    Parameters
    ----------
    id
        Unique in its file; the number of its line where the trace has none.
    arrived_at
        Seconds, since 1970 or since any other beginning; None where the trace has no times.
    key
        Name of the API key, never the key.
    session
        What the requests of one conversation share.
    n
        Sequences asked for.
    temperature, top_p
        As the request had them, the model's default filled in by the recorder.
    max_tokens
        Limit on the output.
    prompt_tokens
        Where only the text is known, a quarter of its UTF-8 bytes, unless a tokenizer counted.
    output_tokens
        None where neither the number nor the output is known.
    overlap, code_share, turns, structured, tools, baseline_only, qps, in_flight
        As in `policies.features.request.RequestFeatures`.
    policy, reason, propensity
        Of the decision that sent it to `backend`; the propensity is the probability of that choice.
    retried_from
        The backend that failed the request first.
    candidates
        Among which that decision chose.
    status
        HTTP status that the client was given.
    error
        What went wrong, in a word; empty if nothing did.
    ttft_s, e2e_s
        Seconds from arrival to the first chunk and to the end.
    itl
        Seconds between each chunk of the stream and the one before.
    queue_s
        Seconds of waiting in the engine, as it said.
    spec
        The engine's own account of its speculation.
    acceptance
        By method: the tokens that a step emits which starts at output position 0, 1, ...; or, as one number, the mean
        acceptance length (output tokens per step).
    prompt_token_ids, output_token_ids
        In the model's vocabulary.
    prompt, messages, output
        The text itself; `messages` as in the chat API.
    prompt_hashes, output_hashes, hashing
        Salted hashes that stand for the text, and how they were made.
    prefix_blocks
        A number for each block of `block_tokens` tokens at the head of the prompt, which stands for the block and all
        before it: what two requests share of them, a prefix cache saves.
    version
        Of the schema that it was written in.
    """

    id: str = ""
    arrived_at: float | None = None
    model: str = ""
    endpoint: str = ""
    key: str = ""
    session: str = ""
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
    tools: bool | None = None
    baseline_only: Sequence[str] = ()
    qps: float | None = None
    in_flight: int | None = None
    policy: str = ""
    reason: str = ""
    backend: str = ""
    method: str = ""
    propensity: float | None = None
    retried_from: str = ""
    candidates: Sequence[TraceCandidate] = ()
    status: int | None = None
    error: str = ""
    ttft_s: float | None = None
    itl: Sequence[float] = ()
    e2e_s: float | None = None
    queue_s: float | None = None
    spec: Speculation | None = None
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
    version: int = VERSION

    @property
    def ended_at(self) -> float | None:
        """When it ended, on the clock of `arrived_at`."""
        return None if self.arrived_at is None or self.e2e_s is None else self.arrived_at + self.e2e_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None where times are missing or there is no second token."""
        if self.ttft_s is None or self.e2e_s is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def text(self) -> Text | None:
        """Prompt and output as numbers that proposers can run on; None if the output is not known in that form.

        `exact` if they are tokens, or single tokens under a hash; else they stand for words or for n-grams: a lookup of
        fewer units than an n-gram has finds less in them than it would in the text.
        """
        if self.output_token_ids:
            return Text(self.prompt_token_ids, self.output_token_ids, exact=True)
        if self.output_hashes:
            hashing = self.hashing or Hashing()
            exact = hashing.unit == "token" and hashing.ngram == 1
            return Text(self.prompt_hashes, self.output_hashes, exact)
        return None
