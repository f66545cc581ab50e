"""The table: means of logarithms by kind of request, each shrunk towards that of the larger group around it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple
from zlib import crc32

from policies.features.request import WORKLOAD_NAME, RequestFeatures
from policies.statistics import Key, Statistics, Sums, Table

TEMPERATURES: Final[tuple[float, ...]] = (0.05, 0.5, 0.9)
OVERLAPS: Final[tuple[float, ...]] = (0.1, 0.3)
PROMPTS: Final[tuple[int, ...]] = (64, 128, 256, 512, 1024, 2048, 8192, 32768)
"""Bounds between bins; a value equal to a bound belongs to the upper bin."""

_LARGER: Final = 5.0
"""Answers that the mean of the larger group counts for in that of a smaller one."""

Groups = tuple[Key, ...]
"""The groups of a request, the largest first: all, bins, workload and length of the prompt, template, client."""

_TEMPLATE, _CLIENT = 3, 4
"""Lengths of the keys of groups."""


def _without_template(key: Key) -> Key:
    return (*key[:_TEMPLATE], "", "")


PER_STEP: Final = Table("log_per_step", 4, half_life_s=7200.0, overflow=_without_template)
LENGTH: Final = Table("log_length", 4, half_life_s=7200.0, overflow=_without_template)
"""Weight, weight x log, count and log, by arm (of lengths none) and the key of the finest group."""
ANSWERS: Final = Table("answers", 2, half_life_s=7200.0, overflow=lambda key: (*key[:_TEMPLATE], ""))
"""Answers and their tokens, by replica and the key of the finest group without its client."""


class Kinds:
    """Finds the groups of requests; a template is one from its second request on."""

    def __init__(self) -> None:
        self._templates: dict[str, bool] = {}  # those seen, and whether more than once

    def of(self, request: RequestFeatures) -> Groups:
        """Return the groups of a request."""
        bins = _NAMES[_bin(TEMPERATURES, request.temperature)][_bin(OVERLAPS, request.overlap)]
        mode = "" if request.thinking is None else "thinking" if request.thinking else "plain"
        if request.restricted:
            mode += " restricted"
        workload = "/".join((_NUMBERS[bisect_right(PROMPTS, request.prompt_tokens)], mode, request.workload))
        largest, middle = (bins,), (bins, workload)
        template = request.template if self._templates.get(request.template) else ""
        if request.client:
            own = (bins, workload, template, client_id(request.client))
            return ((), largest, middle, own[:_TEMPLATE], own) if template else ((), largest, middle, own)
        return ((), largest, middle, (bins, workload, template)) if template else ((), largest, middle)

    def both(self, request: RequestFeatures) -> tuple[Groups, Groups]:
        """Return the groups of a request for its tokens per step, and for its length."""
        groups = self.of(request)
        return groups, self.of_length(request, groups)

    def of_length(self, request: RequestFeatures, groups: Groups) -> Groups:
        """Return the groups by which the length of a request's answer is known: its prompt matters, not its bins."""
        limit = request.max_tokens
        largest = (request.workload,)
        bits = "" if limit is None else _NUMBERS[min(64, limit.bit_length())]
        middle = (request.workload, f"{groups[2][1]}/{bits}")
        return ((), largest, middle, *[(*middle, *group[2:]) for group in groups[3:]])

    def see(self, template: str) -> None:
        """Count a request of a template."""
        if not self._templates.get(template) and template:
            known = self._templates.pop(template, None) is not None
            if len(self._templates) >= _MOST_TEMPLATES:
                del self._templates[next(iter(self._templates))]
            self._templates[template] = known


def _bin(bounds: tuple[float, ...], value: float) -> int:
    number = 0
    for bound in bounds:
        number += value >= bound
    return number


def client_id(client: str) -> str:
    """Return what stands for a client in keys."""
    return f"{crc32(client.encode()):08x}"


class Shares:
    """What an answer of each client weighs in what all share: together none gets more than twice what others have."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._total = 0.0

    def weight(self, client: str) -> float:
        """Count an answer of a client, and return its weight."""
        self._counts[client] = self._counts.get(client, 0.0) + 1.0
        self._total += 1.0
        if self._total > _RECENT:
            self._counts = {one: count / 2 for one, count in self._counts.items() if count >= 1.0}
            self._total = sum(self._counts.values())
        return self.of(client)

    def of(self, client: str) -> float:
        """Return the weight of an answer of a client that was counted before."""
        own, others = self._counts.get(client, 1.0), len(self._counts) - 1
        return min(1.0, _MOST_SHARE * (self._total - own + 1.0) / (others * own)) if others > 0 else 1.0


class Means:
    """Means by arm and group, from the answers of all gateways; an own answer counts at once."""

    def __init__(self, table: Table, statistics: Statistics, most: float) -> None:
        self.table, self.statistics = table, statistics
        self._most = most  # bound on the means that other gateways tell
        self.arms: dict[str, dict[Key, tuple[float, float]]] = {}  # count and sum by group
        self._version: tuple[int, int] = 0, 0

    def mean(self, arm: str, groups: Groups) -> float:
        """Return the mean of a request's groups, each weighed against that of the one around it; 0 of nothing."""
        known, mean = self.arms.get(arm), 0.0
        if known is not None:
            for group in groups:
                found = known.get(group)
                if found is not None:
                    mean = (found[1] + _LARGER * mean) / (found[0] + _LARGER)
        return mean

    def count(self, arm: str, group: Key) -> float:
        """Return how many answers of a group are known."""
        known = self.arms.get(arm)
        return 0.0 if known is None else known.get(group, (0.0, 0.0))[0]

    def add(self, arm: str, groups: Groups, log: float, weight: float, own: float, now_s: float) -> None:
        """Add an answer, with its weight in what all clients share, and in what its own client has alone."""
        finest = groups[-1]
        key = (arm, *finest, *_EMPTY[len(finest) :])
        self.statistics.add_at(now_s, self.table, key, (weight, weight * log, own, own * log))
        _add(self.arms.setdefault(arm, {}), groups, (weight, weight * log, own, own * log))

    def is_due(self, now_s: float) -> bool:
        """Return whether others have told something, or an epoch has ended, since the last `read`."""
        version = self.statistics.told, int(now_s // self.table.epoch_s)
        is_due, self._version = version != self._version, version
        return is_due

    def read(self) -> dict[str, dict[Key, tuple[float, float]]]:
        """Return `arms` as all sums have it; may be called from any thread."""
        arms: dict[str, dict[Key, tuple[float, float]]] = {}
        for key, sums in self.told():
            _add(arms.setdefault(key[0], {}), nested(key[1:]), sums)
        return arms

    def told(self) -> Iterator[tuple[Key, Sums]]:
        """Yield the sums of all gateways by arm and finest group, within what can be; from any thread."""
        for key, sums in self.statistics.buckets(self.table).items():
            if len(key) == _CLIENT + 1 and sums[0] >= 0.0 and sums[2] > 0.0:
                yield key, self._possible(sums)

    def _possible(self, sums: Sums) -> Sums:
        weight, log, own, own_log = sums
        most, most_own = self._most * weight, self._most * own
        return weight, min(max(-most, log), most), own, min(max(-most_own, own_log), most_own)


def without_client(finest: Key) -> Key:
    """Return bins, workload and template of the finest group; an empty template for none."""
    return (*finest[:_TEMPLATE], "")[:_TEMPLATE]


class Typical(NamedTuple):
    """What stands for the requests of a group."""

    workload: str
    temperature: float
    prompt_tokens: float


def typical(kind: Key) -> Typical:
    """Return what stands for the requests of a workload's group, or of a smaller one."""
    prompt, _, name = kind[1].split("/")
    return Typical(name, _MIDDLES[kind[0]], _PROMPTS[prompt])


def is_kind(key: Key) -> bool:
    """Return whether a key that another gateway may have written is one of `typical`."""
    prompt, *rest = key[1].split("/")
    return key[0] in _MIDDLES and prompt in _PROMPTS and len(rest) == 2 and bool(_NAMED(rest[1]))


def answers_of(statistics: Statistics) -> Iterator[tuple[str, Key, float, float]]:
    """Yield replicas with bins, workload and template of requests, and answers and their tokens; from any thread."""
    for (replica, *kind), (answers, tokens) in statistics.buckets(ANSWERS).items():
        if len(kind) == _TEMPLATE and is_kind((*kind,)) and min(answers, tokens) >= 0.0:
            yield replica, (*kind,), answers, tokens


def nested(finest: Key) -> Groups:
    """Return the groups around the finest, as `Kinds` gives them."""
    groups = [(), finest[:1], finest[:2]]
    if finest[2]:
        groups.append(finest[:_TEMPLATE])
    if finest[3]:
        groups.append(finest)
    return tuple(groups)


def _add(known: dict[Key, tuple[float, float]], groups: Groups, sums: Sums) -> None:
    count, log, own, own_log = sums
    for group in groups:
        if len(group) == _CLIENT:
            count, log = own, own_log
        before = known.get(group)
        if before is not None:
            known[group] = before[0] + count, before[1] + log
        elif len(known) < _MOST_GROUPS or len(group) < _TEMPLATE:
            known[group] = count, log


_NAMES: Final = tuple(
    tuple(f"{temperature}/{overlap}" for overlap in range(len(OVERLAPS) + 1))
    for temperature in range(len(TEMPERATURES) + 1)
)
_NAMED: Final = re.compile(f"({WORKLOAD_NAME.pattern})?").fullmatch
_NUMBERS: Final = tuple(map(str, range(65)))
_EMPTY: Final = ("", "", "", "")
_MIDDLES: Final = {name: middle for names, middle in zip(_NAMES, (0.0, 0.3, 0.7, 1.0), strict=True) for name in names}
_PROMPTS: Final = {str(number): tokens for number, tokens in enumerate((48.0, *[1.4 * bound for bound in PROMPTS]))}
"""Temperature, and tokens of the prompt, that stand for each bin."""
_MOST_TEMPLATES: Final = 4096
_MOST_GROUPS: Final = 16_384
_MOST_SHARE: Final = 2.0
_RECENT: Final = 2000.0
