"""The content of one choice of an answer, decided before the engine plays it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from backends.calibration.calibration import Kind
from backends.simulator.server.protocol import SampledBody
from backends.simulator.text.model import Sampling, TargetModel
from backends.simulator.text.tokenizer import END_OF_TURN

_FORCED_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice of an answer."""

    prompt_ids: list[int]
    ids: list[int]
    text: str
    lengths: list[int]  # for each token, the number of characters of `text` that can be shown once it has been emitted
    confidence: list[float]  # probability of each token
    kind: Kind
    # finish_reason, stop_reason: `stop` or `length`; and the stop string or token that ended the answer, None if the
    # model ended by itself.
    finish_reason: str
    stop_reason: str | int | None = None


def sampling(body: SampledBody, index: int) -> Sampling:
    """Return how choice `index` of a request is sampled; its temperature is the client's or has been set."""
    assert body.temperature is not None
    return Sampling(body.temperature, 1.0 if body.top_p is None else body.top_p, body.seed, index)


def compose(
    model: TargetModel, prompt_ids: list[int], body: SampledBody, limit: int, index: int, forced: str | None
) -> Answer:
    """Return the content of choice `index` of a request."""
    if forced is None:
        how = sampling(body, index)
        if body.top_k == 1:
            how = replace(how, temperature=0.0)
        writing = model.write(prompt_ids, how, limit, body.min_tokens, endless=body.ignore_eos)
        ids, confidence, kind, stopped = writing.ids, writing.confidence, writing.kind, writing.stopped
    else:
        forced_ids = [*model.tokenizer.encode(forced), END_OF_TURN]
        ids, stopped, kind = forced_ids[:limit], len(forced_ids) <= limit, Kind.EXTRACTION
        confidence = [_FORCED_CONFIDENCE] * len(ids)
    stop_reason: str | int | None = None
    if body.stop_token_ids:
        for position, token in enumerate(ids[body.min_tokens :], body.min_tokens):
            if token in body.stop_token_ids:
                ids, confidence, stopped, stop_reason = ids[: position + 1], confidence[: position + 1], True, token
                break
    text, lengths = model.tokenizer.pieces(ids)
    stop = _first_stop(text, body, lengths)
    if stop is not None:
        start, string = stop
        tokens = bisect_left(lengths, start + len(string)) + 1
        text = text[: start + len(string)] if body.include_stop_str_in_output else text[:start]
        ids, confidence, stopped, stop_reason = ids[:tokens], confidence[:tokens], True, string
        lengths = [min(length, len(text)) for length in lengths[:tokens]]
    return Answer(prompt_ids, ids, text, lengths, confidence, kind, "stop" if stopped else "length", stop_reason)


def _first_stop(text: str, body: SampledBody, lengths: Sequence[int]) -> tuple[int, str] | None:
    """Return the start of the first stop string that ends after the minimum number of tokens, and the string."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    since = lengths[min(body.min_tokens, len(lengths)) - 1] if body.min_tokens and lengths else 0
    matches = [(start, stop) for stop in stops if stop and (start := text.find(stop, since)) >= 0]
    return min(matches, key=lambda match: match[0] + len(match[1]), default=None)
