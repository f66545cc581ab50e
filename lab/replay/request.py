"""A traced request made ready to be played: what a policy sees of it, and what each replica's steps would emit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from random import Random

import numpy as np
import numpy.typing as npt

from backends.drafting.ngram import lookup_bounds, ngram_replay
from backends.drafting.script import BLOCK_TOKENS, Script, Steps, plain_steps
from backends.drafting.suffix import SuffixCache
from backends.speculation import Method
from lab.evaluate.log import features_of
from lab.trace import Text, TraceRecord
from policies.features.request import Endpoint, RequestFeatures, describe

_NAMES = [one.name for one in fields(RequestFeatures)]
_VALUES = attrgetter(*_NAMES)
_QPS, _IN_FLIGHT = _NAMES.index("qps"), _NAMES.index("in_flight")


@dataclass(slots=True)
class ReplayRequest:
    """One request of a trace.

    Parameters
    ----------
    arrived_s
        Seconds from the beginning of the replay.
    features
        What a policy sees, but for the load.
    prompt_tokens, output_tokens
        At least 1 each.
    acceptance
        As in `TraceRecord`.
    text
        On which lookups are replayed, where the trace has no acceptance of theirs.
    prefix_blocks
        As in `Script`.
    """

    arrived_s: float
    features: RequestFeatures
    prompt_tokens: int
    output_tokens: int
    acceptance: Mapping[str, Sequence[int] | float]
    text: Text | None
    prefix_blocks: tuple[int, ...]
    _scripts: dict[tuple[object, ...], Script | None] = field(default_factory=dict)

    def script(self, method: Method, k: int, config: Mapping[str, object]) -> Script | None:
        """Return what the steps of a replica emit; None where neither trace nor text tells: they must be drawn."""
        known = (method.value, k, _bounds(method, config))
        if known not in self._scripts:
            steps = self._steps(method, k, config)
            self._scripts[known] = (
                None
                if steps is None
                else Script(self.prompt_tokens, self.output_tokens, steps[0], steps[1], self.prefix_blocks)
            )
        return self._scripts[known]

    def prepare(self, replicas: Iterable[tuple[Method, int, Mapping[str, object]]]) -> None:
        """Work out the steps on replicas of these methods, k and configs, and forget the text."""
        for replica in replicas:
            self.script(*replica)
        self.text = None

    def _steps(self, method: Method, k: int, config: Mapping[str, object]) -> Steps | None:
        if method is Method.BASELINE:
            return plain_steps(self.output_tokens)
        recorded = self.acceptance.get(method.value)
        if isinstance(recorded, (int, float)):
            return _constant(float(recorded), method, k, self.output_tokens)
        if recorded is not None and len(recorded) > 1:
            return _recorded(recorded, method, k, self.output_tokens)
        text = self.text
        if text is None or not text.exact or method not in (Method.NGRAM, Method.SUFFIX):
            return None
        output = text.output[: self.output_tokens]
        if method is Method.NGRAM:
            steps = ngram_replay(text.prompt, output, k, *lookup_bounds(config))
        else:
            steps = SuffixCache.of(dict(config), 1 << 30).replay(text.prompt, output)
        return _padded(steps, self.output_tokens)


def _bounds(method: Method, config: Mapping[str, object]) -> tuple[object, ...]:
    """Return what else than k a lookup on a text depends on."""
    if method is Method.NGRAM:
        return lookup_bounds(config)
    if method is Method.SUFFIX:
        return tuple(sorted((key, value) for key, value in config.items() if key.startswith("suffix_")))
    return ()


def replay_request(record: TraceRecord, arrived_s: float, default_temperature: float) -> ReplayRequest:
    """Make a request of a trace ready."""
    features = _described(record)
    if record.temperature is None:
        features = replace(features, temperature=default_temperature)
    blocks = record.prefix_blocks
    if blocks:
        tokens = tuple(min(record.prompt_tokens, record.block_tokens * (place + 1)) for place in range(len(blocks)))
        features = replace(features, prefix=tuple(blocks), prefix_tokens=tokens)
    return ReplayRequest(
        arrived_s,
        features,
        max(1, record.prompt_tokens),
        max(1, record.output_tokens or 1),
        record.acceptance,
        record.text,
        engine_blocks(record),
    )


def under_load(features: RequestFeatures, qps: float, in_flight: int) -> RequestFeatures:
    """Return the features of a request with the load that it meets; an eighth of the cost of `dataclasses.replace`."""
    values = list(_VALUES(features))
    values[_QPS], values[_IN_FLIGHT] = qps, in_flight
    return RequestFeatures(*values)


def engine_blocks(record: TraceRecord) -> tuple[int, ...]:
    """Return the engine's small blocks within the trace's large ones, as far as the prompt fills them."""
    within = max(1, record.block_tokens // BLOCK_TOKENS)
    blocks = [block * within + place for block in record.prefix_blocks for place in range(within)]
    return tuple(blocks[: record.prompt_tokens // BLOCK_TOKENS])


def _described(record: TraceRecord) -> RequestFeatures:
    """Return the features as recorded, what the record lacks worked out from its text."""
    features = features_of(record)
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
    seen = describe(endpoint, body, model=record.model, default_temperature=0.0, qps=0.0, in_flight=0)
    return replace(
        features,
        template=record.template or seen.template,
        overlap=seen.overlap if record.overlap is None else record.overlap,
        code_share=seen.code_share if record.code_share is None else record.code_share,
        turns=seen.turns if record.turns is None else record.turns,
    )


def _recorded(recorded: Sequence[int], method: Method, k: int, output_tokens: int) -> Steps:
    """Return recorded steps, cut to `k` drafts; where they end before the answer does, they begin again."""
    taken = np.resize(np.asarray(recorded, np.int32)[1:], max(0, output_tokens - 1))
    emitted = np.concatenate([np.ones(1, np.int32), np.clip(taken, 1, k + 1)]).astype(np.int32)
    return _bounded(emitted, method, k)


def _constant(tokens_per_step: float, method: Method, k: int, output_tokens: int) -> Steps:
    """Return steps of a given mean, as even as whole tokens allow; always the same for the same request."""
    mean = min(max(1.0, tokens_per_step), k + 1.0)
    less = int(mean)
    rng = Random(output_tokens * 1_000_003 + round(1e6 * mean))
    emitted = np.array([less + (rng.random() < mean - less) for _ in range(output_tokens)], np.int32)
    return _bounded(emitted, method, k)


def _bounded(emitted: npt.NDArray[np.int32], method: Method, k: int) -> Steps:
    """Keep steps within the answer, and tell what they drafted: a trace tells only what was accepted.

    Models draft k tokens in every step. A lookup drafts where it finds something; it is taken to have found what was
    accepted, so its failed drafts cost nothing here.
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
    """Lengthen steps to the answer: where the text is shorter than the trace says, the rest comes token by token."""
    emitted, drafted = plain_steps(output_tokens)
    emitted[: len(steps[0])], drafted[: len(steps[1])] = steps
    return emitted, drafted
