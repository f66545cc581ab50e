"""Kinds of replicas (method, k, memory fit), and mixes of replicas of these kinds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import combinations_with_replacement
from typing import Any

import yaml

from backends.calibration.batch_schedule import SCHEDULED
from backends.calibration.calibration import Calibration
from backends.draft_schedule import draft_tokens
from backends.speculation import MODELLESS, SCHEDULE_KEY, Method
from lab.plan.memory import Fit, fit
from lab.simulation.drafts import best_schedule, mean_context_tokens, tokens_per_step
from lab.simulation.request import ReplayRequest

Mix = tuple[int, ...]
"""Index of the kind of each replica, ascending."""

USUAL: tuple[tuple[Method, tuple[int, ...]], ...] = (
    (Method.BASELINE, (0,)),
    (Method.NGRAM, (3, 5)),
    (Method.SUFFIX, (24,)),
    (Method.EAGLE, (3,)),
    (Method.EAGLE3, (2, 3, 5)),
    (Method.DRAFT_MODEL, (3, 5)),
)
"""Methods and k to try by default; for heads and n-gram drafting, k from 2 to 5 proved best."""

_PUBLISHED = files("lab.plan").joinpath("published_drafts.yaml")
DRAFTS: Mapping[str, Mapping[str, str]] = yaml.safe_load(_PUBLISHED.read_text("utf-8"))
"""Published draft models and heads, by target and method."""

_NGRAM_MAX = 4
_OWN = ("method", "num_speculative_tokens", "model", SCHEDULE_KEY)


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """One way to run a replica."""

    method: Method
    k: int  # maximum number of draft tokens per step
    draft: str  # name of the draft model or head; empty without one
    fit: Fit  # whether it fits into memory, and how much is left
    extra: tuple[tuple[str, Any], ...] = ()  # further options of the speculative config, as pairs
    # Ranges `(first, last, k)` of batch sizes; empty for a constant k.
    schedule: tuple[tuple[int, int, int], ...] = ()
    context: int | None = None  # the longest that its drafter leaves the engine, from vLLM 0.33 on; None: any

    @property
    def title(self) -> str:
        """Method and k, such as `eagle3 k=3`, or `eagle3 k<=5` where k depends on the batch size."""
        if self.method in (Method.BASELINE, Method.SUFFIX):
            return self.method.value
        return f"{self.method} k{'<' * bool(self.schedule)}={self.k}"

    @property
    def name(self) -> str:
        """Name of a replica of this kind, such as `eagle3-k3` or `draft-model-to-k5`."""
        return self.title.replace(" k<=", "-to-k").replace(" k=", "-k").replace("_", "-")

    @property
    def config(self) -> dict[str, Any]:
        """The content of vLLM's `--speculative-config` without the method; empty for a baseline."""
        if self.method is Method.BASELINE:
            return {}
        config: dict[str, Any] = {"num_speculative_tokens": self.k}
        if self.method is Method.SUFFIX:
            config = {} if self.k == 24 else config
        elif self.method is Method.NGRAM:
            config["prompt_lookup_max"] = _NGRAM_MAX
        elif self.draft:
            config["model"] = self.draft
        if self.schedule:
            config[SCHEDULE_KEY] = [list(each) for each in self.schedule]
        return config | dict(self.extra)


def gpus_of(calibration: Calibration) -> int:
    """Return a replica's number of GPUs, which split target and draft."""
    count = re.match(r"(\d+) ?x", calibration.hardware)  # not the 4090 in a name
    return int(count[1]) if count else 1


def kinds(
    calibration: Calibration, max_model_len: int, methods: Sequence[tuple[Method, Sequence[int]]] = USUAL
) -> list[ReplicaKind]:
    """Return the kinds of replicas with known speed, including those that do not fit.

    Omits methods without a published acceptance or draft for this target.
    """
    drafts = DRAFTS.get(calibration.target, {})
    result = []
    for method, numbers in methods:
        entry = calibration.methods.get(method)
        if entry is None or not (method in MODELLESS or (entry.acceptance and method in drafts)):
            continue
        draft = drafts.get(method, "")
        result += [ReplicaKind(method, k, draft, fit(calibration, method, max_model_len + k)) for k in numbers]
    return result


def with_schedules(
    kinds: Sequence[ReplicaKind], calibration: Calibration, requests: Sequence[ReplayRequest]
) -> list[ReplicaKind]:
    """Return kinds and, for each method that may gain by it, one more with k by batch size, or another k.

    Its schedule is the best for these requests with drafts of up to the method's largest k.
    """
    result = list(kinds)
    context_tokens = mean_context_tokens(requests)
    for method in dict.fromkeys(kind.method for kind in kinds if kind.method in SCHEDULED and kind.fit.fits):
        longest = max((kind for kind in kinds if kind.method is method), key=lambda kind: kind.k)
        per_step = tokens_per_step(calibration, method, longest.config, requests)
        batch = calibration.scheduler.max_num_seqs
        schedule = best_schedule(calibration, method, longest.config, per_step, context_tokens, batch)
        if schedule:
            by_batch = tuple(schedule) if len(schedule) > 1 else ()
            kind = replace(longest, k=max(k for *_, k in schedule), schedule=by_batch)
            result += [kind] if kind.title not in {each.title for each in kinds} else []
    return result


def kind_of(method: Method, config: Mapping[str, Any], calibration: Calibration) -> ReplicaKind:
    """Return the kind of a replica in the current pool."""
    extra = {key: value for key, value in config.items() if key not in _OWN}
    schedule = tuple((first, last, tokens) for first, last, tokens in config.get(SCHEDULE_KEY) or ())
    own, k = fit(calibration, method), draft_tokens(method, config)
    return ReplicaKind(method, k, str(config.get("model", "")), own, tuple(sorted(extra.items())), schedule)


def with_refusals(kind: ReplicaKind, requests: Sequence[ReplayRequest]) -> ReplicaKind:
    """Return a kind, marked as not fitting if its engine rejects some of the requests."""
    room = min(kind.fit.tokens - kind.k, kind.context or kind.fit.tokens)
    refused = sum(each.prompt_tokens + each.output_tokens > room for each in requests)
    if not refused or room <= 0:
        return kind
    why = f"; from vLLM 0.33 on its draft shortens its context to {room:,} tokens" if kind.context == room else ""
    reason = f"{kind.fit.reason}{why}; it refuses {refused:,} of {len(requests):,} requests"
    return replace(kind, fit=replace(kind.fit, fits=False, reason=reason))


def mixes(methods: Mapping[int, Method], replicas: int) -> Iterator[Mix]:
    """Yield every mix of this many replicas.

    Examples
    --------
    >>> list(mixes({0: Method.BASELINE, 4: Method.EAGLE3, 5: Method.EAGLE3}, 2))
    [(0, 0), (0, 4), (0, 5), (4, 4), (5, 5)]
    """
    for mix in combinations_with_replacement(sorted(methods), replicas):
        if is_coherent(mix, methods):
            yield mix


def is_coherent(mix: Mix, methods: Mapping[int, Method]) -> bool:
    """Return whether a mix has at most one kind of each method."""
    members = set(mix)
    return len({methods[index] for index in members}) == len(members)


def neighbours(mix: Mix, methods: Mapping[int, Method]) -> Iterator[Mix]:
    """Yield the mixes that change the kind of one replica, or of all replicas of one kind.

    Examples
    --------
    >>> list(neighbours((4, 4), {0: Method.BASELINE, 4: Method.EAGLE3, 5: Method.EAGLE3}))
    [(0, 4), (0, 0), (5, 5)]
    """
    for old in sorted(set(mix)):
        rest = list(mix)
        rest.remove(old)
        for new in methods:
            if new != old:
                others = [[*rest, new], [new if one == old else one for one in mix]]
                yield from (
                    other
                    for other in dict.fromkeys(tuple(sorted(other)) for other in others)
                    if is_coherent(other, methods)
                )


def title(mix: Mix, kinds: Sequence[ReplicaKind]) -> str:
    """Return the title of a mix, such as `2x suffix, 1x eagle3 k=3`."""
    return ", ".join(f"{count}x {kinds[index].title}" for index, count in sorted(Counter(mix).items()))
