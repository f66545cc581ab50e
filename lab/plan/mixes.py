"""What a pool could be made of: the ways a replica can speculate and fit, and the mixes of so many replicas of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import comb
from typing import Any

from backends.calibration.calibration import Calibration, calibration_names, load_calibration
from backends.calibration.parameters import draft_tokens
from backends.memory.catalogue import Draft, Gpu, draft, gpu, target
from backends.memory.estimate import Fit, Footprint, Machine, fit, footprint
from backends.speculation import Method

Mix = tuple[int, ...]
"""Places of kinds, one for each replica, rising."""

USUAL: tuple[tuple[Method, tuple[int, ...]], ...] = (
    (Method.BASELINE, (0,)),
    (Method.NGRAM, (3, 5)),
    (Method.SUFFIX, (24,)),
    (Method.EAGLE, (3,)),
    (Method.EAGLE3, (2, 3, 5)),
    (Method.DRAFT_MODEL, (3, 5)),
)
"""Methods and k that are tried where nothing is said: k of 2 to 5 is what was seen to win for heads and lookups."""

_LOOKUPS = frozenset({Method.BASELINE, Method.NGRAM, Method.SUFFIX})
_NGRAM_MAX = 4


@dataclass(frozen=True, slots=True)
class Kind:
    """One way that a replica can be run.

    Parameters
    ----------
    k
        Tokens drafted a step at most.
    draft
        Name of the draft model or head; empty where there is none.
    fit
        Whether it fits, and what room it leaves.
    extra
        More of its speculative config, as pairs.
    """

    method: Method
    k: int
    draft: str
    fit: Fit
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def title(self) -> str:
        """Method and k, as `eagle3 k=3`."""
        return self.method.value if self.method in (Method.BASELINE, Method.SUFFIX) else f"{self.method} k={self.k}"

    @property
    def config(self) -> dict[str, Any]:
        """What vLLM's `--speculative-config` is, without the method; empty for a baseline."""
        if self.method is Method.BASELINE:
            return {}
        config: dict[str, Any] = {"num_speculative_tokens": self.k}
        if self.method is Method.SUFFIX:
            config = {} if self.k == 24 else config
        elif self.method is Method.NGRAM:
            config["prompt_lookup_max"] = _NGRAM_MAX
        elif self.draft:
            config["model"] = self.draft
        return config | dict(self.extra)


def machine_of(calibration: Calibration, on: Gpu | None = None) -> Machine:
    """Return the GPUs that a calibration was measured on, or as many of another kind.

    Raises
    ------
    ValueError
        If it does not say what they are, and no other is given.
    """
    count = re.match(r"(\d+)", calibration.hardware)
    parallel = int(count[1]) if count else 1
    memory = calibration.memory
    if on is None:
        own = Gpu(
            title=calibration.hardware.partition(",")[0].removeprefix(f"{parallel}x "),
            memory_mib=round(memory.gpu_gib / parallel * 1024),
            source=memory.source,
        )
        return Machine(own, parallel, memory.utilization, memory.reserved_gib / parallel)
    return Machine(on, parallel, memory.utilization, memory.reserved_gib / parallel)


def calibration_on(like: Calibration, name: str) -> Calibration:
    """Return the calibration of the same target on another GPU.

    Raises
    ------
    ValueError
        If there is none: step times cannot be guessed.
    """
    gpu(name)
    if _has(like.hardware, name):
        return like
    known = [load_calibration(one) for one in calibration_names()]
    same = [one for one in known if one.target == like.target]
    found = sorted((one for one in same if _has(one.hardware, name)), key=lambda one: len(one.name))
    if not found:
        told = "; ".join(f"{one.name} ({one.hardware})" for one in same)
        raise ValueError(f"no step times of {like.target} on {name} are known, so nothing can be said there: {told}")
    return found[0]


def _has(hardware: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", hardware.lower()) is not None


def kinds(
    calibration: Calibration,
    machine: Machine,
    max_model_len: int,
    wanted: Sequence[tuple[Method, Sequence[int]]] = USUAL,
) -> list[Kind]:
    """Return the ways a replica can be run whose speed is known, those that do not fit too.

    Left out: methods of whose acceptance or draft nothing is published for this target.

    Parameters
    ----------
    max_model_len
        Tokens of the longest request that must be served.
    """
    of = target(calibration.target)
    found = []
    for method, numbers in wanted:
        entry = calibration.methods.get(method)
        if entry is None or not (method in _LOOKUPS or entry.acceptance):
            continue
        for k in numbers:
            made = draft(of, method, k) if of is not None else None
            published = isinstance(made, Draft) and made.source != "shape" and bool(made.names)
            if method not in _LOOKUPS and not published:
                continue
            if of is not None:
                held = footprint(of, made)
            else:
                memory = calibration.memory
                held = Footprint(memory.weights_gib, memory.kv_kib_per_token, entry.weights_gib, entry.kv_kib_per_token)
            name = made.names[0] if made is not None else ""
            found.append(Kind(method, k, name, fit(held, machine, max_model_len=max_model_len + k)))
    return found


def kind_of(method: Method, config: Mapping[str, Any], calibration: Calibration, machine: Machine) -> Kind:
    """Return a replica of the present pool as a kind.

    Raises
    ------
    ValueError
        If the calibration knows nothing of its method.
    """
    calibration.method(method)
    k = draft_tokens(method, config)
    extra = {key: value for key, value in config.items() if key not in ("method", "num_speculative_tokens", "model")}
    of = target(calibration.target)
    entry, memory = calibration.methods[method], calibration.memory
    made = draft(of, method, k) if of is not None else None
    if of is not None and (made is not None or method in _LOOKUPS):
        held = footprint(of, made)
    else:
        held = Footprint(memory.weights_gib, memory.kv_kib_per_token, entry.weights_gib, entry.kv_kib_per_token)
    return Kind(method, k, str(config.get("model", "")), fit(held, machine), tuple(sorted(extra.items())))


def mixes(kinds: int, replicas: int) -> Iterator[Mix]:
    """Yield every mix of so many replicas of so many kinds."""
    yield from combinations_with_replacement(range(kinds), replicas)


def count_mixes(kinds: int, replicas: int) -> int:
    """Return how many mixes there are."""
    return comb(kinds + replicas - 1, replicas)


def neighbours(mix: Mix, kinds: int) -> Iterator[Mix]:
    """Yield the mixes in which one replica is of another kind."""
    for old in sorted(set(mix)):
        rest = list(mix)
        rest.remove(old)
        for new in range(kinds):
            if new != old:
                yield tuple(sorted([*rest, new]))


def title(mix: Mix, kinds: Sequence[Kind]) -> str:
    """Return a mix in words, as `2x suffix, 1x eagle3 k=3`."""
    return ", ".join(f"{count}x {kinds[place].title}" for place, count in sorted(Counter(mix).items()))
