"""A request of a trace prepared for replay: its features, and the tokens that each step of a replica emits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import islice
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from backends.drafting.ngram import lookup_bounds, ngram_replay
from backends.drafting.script import BLOCK_TOKENS, Script, Steps, plain_steps
from backends.drafting.suffix import SuffixCache
from backends.speculation import MODELLESS, Method
from lab.trace.record import LARGEST_BLOCK, Text, TraceRecord
from policies.features.request import TYPICAL_TOKENS, Endpoint, RequestFeatures, describe

_NAMES = [one.name for one in fields(RequestFeatures)]
_VALUES = attrgetter(*_NAMES)
_QPS, _IN_FLIGHT = _NAMES.index("qps"), _NAMES.index("in_flight")
ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}
_GOLDEN, _HALVINGS, _LEAST_SHARE = 0.6180339887498949, 24, 1e-9
LONGEST, _MOST_TOKENS = 1 << 24, 1 << 60
"""Tokens beyond any engine's context, for which there are no scripts, and the most tokens told apart."""


@dataclass(slots=True)
class ReplayRequest:
    """One request of a trace."""

    arrived_s: float  # seconds from the start of the replay
    features: RequestFeatures  # features for the policy, without the load
    prompt_tokens: int  # at least 1, like the output
    output_tokens: int
    acceptance: Mapping[str, Sequence[int] | float]  # as in `TraceRecord`
    text: Text | None  # for replaying n-gram and suffix drafting if the trace lacks their acceptance
    prefix_blocks: tuple[int, ...]  # as in `Script`
    session: str = ""  # id shared by the requests of one session; empty for a request of its own
    # Seconds from the end of the previous answer in its session; None if it does not wait for one.
    think_s: float | None = None
    drafted: Mapping[str, int] = field(default_factory=dict)  # k at which a mean acceptance was recorded, by method
    _scripts: dict[tuple[object, ...], Script | None] = field(default_factory=dict)

    def script(self, method: Method, k: int, config: Mapping[str, object]) -> Script | None:
        """Return the steps on a replica; None if neither trace nor text determines them, so that they must be drawn."""
        if not (self.acceptance or self.text or self._scripts) and method is not Method.BASELINE:
            return None  # true of all requests in most traces
        if self.output_tokens > LONGEST:
            return None
        key = (method.value, k, _drafting_options(method, config))
        if key not in self._scripts:
            steps = self._steps(method, k, config)
            self._scripts[key] = (
                None
                if steps is None
                else Script(self.prompt_tokens, self.output_tokens, steps[0], steps[1], self.prefix_blocks)
            )
        return self._scripts[key]

    def warm_script(self, cache: SuffixCache, learn: bool = False) -> Script | None:
        """Return the steps on a suffix replica with a tree of earlier answers; None if the text is unknown."""
        text = self.text
        if text is None or not text.exact or Method.SUFFIX.value in self.acceptance or self.output_tokens > LONGEST:
            return None
        steps = _padded(cache.replay(text.prompt, text.output[: self.output_tokens], learn), self.output_tokens)
        return Script(self.prompt_tokens, self.output_tokens, *steps, self.prefix_blocks)

    def _steps(self, method: Method, k: int, config: Mapping[str, object]) -> Steps | None:
        if method is Method.BASELINE or self.output_tokens == 1:
            return plain_steps(self.output_tokens)
        recorded = self.acceptance.get(method.value)
        if isinstance(recorded, (int, float)):
            return _drawn(float(recorded), self.drafted.get(method.value, k), method, k, self.output_tokens)
        if recorded is not None and len(recorded) > 1:
            return _recorded(recorded, method, k, self.output_tokens)
        text = self.text
        if text is None or not text.exact or method not in (Method.NGRAM, Method.SUFFIX):
            return None
        output = text.output[: self.output_tokens]
        if method is Method.NGRAM:
            steps = ngram_replay(text.prompt, output, k, *lookup_bounds(config))
        else:
            steps = SuffixCache(config).replay(text.prompt, output)
        return _padded(steps, self.output_tokens)


def _drafting_options(method: Method, config: Mapping[str, object]) -> tuple[object, ...]:
    """Return the options other than k on which n-gram and suffix drafting depend."""
    if method is Method.NGRAM:
        return lookup_bounds(config)
    if method is Method.SUFFIX:
        return tuple(sorted((key, value) for key, value in config.items() if key.startswith("suffix_")))
    return ()


def replay_request(record: TraceRecord, arrived_s: float, default_temperature: float) -> ReplayRequest:
    """Prepare a request of a trace for replay.

    Examples
    --------
    >>> record = TraceRecord(prompt_tokens=9, output_tokens=5, acceptance={"eagle3": [1, 3, 1, 1, 2]})
    >>> request = replay_request(record, 0.0, default_temperature=1.0)
    >>> request.script(Method.EAGLE3, 3, {}).emitted.tolist()
    [1, 3, 1, 1, 1]
    """
    features = _described(record, default_temperature)
    if blocks := record.prefix_blocks:
        features.prefix = tuple(blocks)
        ends = range(record.block_tokens, record.block_tokens * len(blocks) + 1, record.block_tokens)
        features.prefix_tokens = tuple([min(record.prompt_tokens, end) for end in ends])
    return ReplayRequest(
        arrived_s,
        features,
        max(1, features.prompt_tokens),
        _expected_tokens(record),
        record.acceptance,
        record.text,
        engine_blocks(record) if blocks else (),
        record.session,
        record.think_time_s,
        _drafted(record),
    )


def _drafted(record: TraceRecord) -> dict[str, int]:
    """Return how many tokens a step drafted by the method that served a request, if that is a model's."""
    spec = record.spec
    if spec is None or not spec.drafted_tokens or not spec.drafting_steps or record.method in MODELLESS:
        return {}
    return {record.method: max(1, round(spec.drafted_tokens / spec.drafting_steps))}


def _expected_tokens(record: TraceRecord) -> int:
    """Return the tokens of an answer, at least 1; if unknown, the typical number, or the limit if that is lower."""
    if record.output_tokens is not None:
        return min(max(1, record.output_tokens), _MOST_TOKENS)
    return max(1, min(TYPICAL_TOKENS, TYPICAL_TOKENS if record.max_tokens is None else record.max_tokens))


def under_load(features: RequestFeatures, qps: float, in_flight: int) -> RequestFeatures:
    """Return features with the load on arrival; 8x as fast as `dataclasses.replace`."""
    values = list(_VALUES(features))
    values[_QPS], values[_IN_FLIGHT] = qps, in_flight
    return RequestFeatures(*values)


def engine_blocks(record: TraceRecord) -> tuple[int, ...]:
    """Return the engine's small blocks within the trace's large ones, as far as the prompt fills them.

    Examples
    --------
    >>> engine_blocks(TraceRecord(prompt_tokens=40, prefix_blocks=[7], block_tokens=64))
    (28, 29)
    """
    per_block = max(1, record.block_tokens // BLOCK_TOKENS)
    filled = min(record.prompt_tokens, LONGEST) // BLOCK_TOKENS
    blocks = (block * per_block + offset for block in record.prefix_blocks for offset in range(per_block))
    return tuple([block & LARGEST_BLOCK for block in islice(blocks, filled)])


def _described(record: TraceRecord, default_temperature: float) -> RequestFeatures:
    """Return the recorded features, with missing ones computed from the text."""
    features = RequestFeatures(
        record.model,
        ENDPOINTS.get(record.endpoint, Endpoint.CHAT),
        bool(record.stream),
        record.n,
        default_temperature if record.temperature is None else record.temperature,
        1.0 if record.top_p is None else record.top_p,
        record.overlap or 0.0,
        record.code_share or 0.0,
        min(record.prompt_tokens, _MOST_TOKENS),
        record.max_tokens,
        record.template,
        1 if record.turns is None else record.turns,
        bool(record.structured),
        bool(record.tools),
        tuple(record.baseline_only),
        record.qps or 0.0,
        record.in_flight or 0,
        record.workload,
        thinking=record.thinking,
    )
    if record.overlap is not None and record.template:
        return features
    if record.messages:
        endpoint = Endpoint.CHAT
        body: dict[str, object] = {"messages": list(record.messages)}
    elif record.prompt or record.prompt_token_ids:
        endpoint = Endpoint.COMPLETIONS
        body = {"prompt": record.prompt or list(record.prompt_token_ids)}
    else:
        return features
    computed = describe(endpoint, body, model=record.model, default_temperature=0.0, qps=0.0, in_flight=0)
    features.template = record.template or computed.template
    for name in ("overlap", "code_share", "turns"):
        if getattr(record, name) is None:
            setattr(features, name, getattr(computed, name))
    return features


def _recorded(recorded: Sequence[int], method: Method, k: int, output_tokens: int) -> Steps:
    """Return recorded steps with at most `k` drafts each, repeated to the length of the answer."""
    taken = np.resize(np.asarray(recorded, np.int32)[1:], max(0, output_tokens - 1))
    emitted = np.concatenate([np.ones(1, np.int32), np.clip(taken, 1, k + 1)]).astype(np.int32)
    return _bounded(emitted, method, k)


def _drawn(tokens_per_step: float, drafted: int, method: Method, k: int, output_tokens: int) -> Steps:
    """Return steps of `k` drafts that accept a draft as likely as gives a mean where so many were drafted.

    The first one emits one token. Of fewer drafts fewer are accepted: each refused one ends a run of tokens.
    """
    later = output_tokens - 1
    share = _share(later / max(1.0, output_tokens / max(1.0, tokens_per_step) - 1.0), drafted)
    runs = max(1, round(later * (1.0 - share)))
    lengths = 1.0 + np.log((np.arange(runs) + 0.5) / runs) // math.log(max(share, _LEAST_SHARE))
    lengths = lengths[np.argsort(np.arange(runs) * _GOLDEN % 1.0)]
    ends = 1 + np.rint(np.cumsum(lengths) * (later / lengths.sum())).astype(np.int64)
    emitted = np.ones(output_tokens, np.int32)
    emitted[1:] = np.minimum(np.repeat(ends, np.diff(ends, prepend=1)) - np.arange(1, output_tokens), k + 1)
    return _bounded(emitted, method, k)


@lru_cache(4096)
def _share(tokens_per_step: float, drafted: int) -> float:
    """Return the share of drafts that is accepted where a step of so many emits a mean; the first refused ends it.

    Examples
    --------
    >>> round(_share(1.75, 2), 3)
    0.5
    """
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2.0
        low, high = (share, high) if sum(share**at for at in range(drafted + 1)) < tokens_per_step else (low, share)
    return low


def _bounded(emitted: npt.NDArray[np.int32], method: Method, k: int) -> Steps:
    """Truncate steps at the end of the answer, and estimate their drafts, which a trace does not contain.

    Models draft k tokens in every step. N-gram and suffix drafting draft only on a match; they are assumed to match
    where tokens were accepted, so failed drafts cost nothing here.
    """
    output_tokens = len(emitted)
    emitted[0] = 1
    np.minimum(emitted, output_tokens - np.arange(output_tokens), out=emitted)
    if method is Method.NGRAM:
        drafted = np.where(emitted > 1, k, 0)
    elif method is Method.SUFFIX:
        drafted = emitted - 1
    else:
        drafted = np.full(output_tokens, k)
    drafted[0] = 0
    return emitted, drafted.astype(np.int32)


def _padded(steps: Steps, output_tokens: int) -> Steps:
    """Extend steps to the length of the answer; tokens beyond the text come one per step."""
    emitted, drafted = plain_steps(output_tokens)
    emitted[: len(steps[0])], drafted[: len(steps[1])] = steps
    return emitted, drafted
