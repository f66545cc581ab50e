"""The table: means of logarithms by kind of request, each shrunk towards that of the enclosing group."""

from __future__ import annotations

import re
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
"""Weight in answers of the larger group's mean in that of a smaller one."""

Groups = tuple[Key, ...]
"""The groups of a request, the largest first: all, bins, workload and length of the prompt, template, client."""

_TEMPLATE: Final = 3
_CLIENT: Final = 4
"""Lengths of the keys of groups."""
_NAME: Final = 2
"""Place of the workload's name, after the bin of the prompt and the mode."""


def _larger(key: Key) -> Key:
    """Return a key without its template and client or, without those, without the name of its workload."""
    first, bins, workload, *rest = key
    parts = workload.split("/")
    if not any(rest) and len(parts) > _NAME:
        bins, parts[_NAME] = "" if bins == parts[_NAME] else bins, ""
    return (first, bins, "/".join(parts), *_EMPTY[: len(rest)])


PER_STEP: Final = Table("log_per_step", 4, half_life_s=7200.0, overflow=_larger)
LENGTH: Final = Table("log_length", 4, half_life_s=7200.0, overflow=_larger)
"""Weight, weight x log, count and log, by arm (empty for lengths) and the key of the finest group."""
ANSWERS: Final = Table("answers", 2, half_life_s=7200.0, overflow=_larger)
"""Answers and their tokens, by replica and the key of the finest group without its client."""


class RequestKind:
    """The groups of a request for its tokens per step and for its length, and the key of its answer in `ANSWERS`."""

    __slots__ = ("answer", "groups", "lengths")

    def __init__(self, groups: Groups, lengths: Groups) -> None:
        self.groups, self.lengths = groups, lengths
        self.answer = without_client(groups[-1])


class Kinds:
    """Finds the kind of requests; a template is part of it from its second request on."""

    def __init__(self) -> None:
        self._templates: dict[str, bool] = {}  # those seen; True if more than once
        self._kinds: dict[tuple[int, str, str, str], RequestKind] = {}

    def of(self, request: RequestFeatures) -> RequestKind:
        """Return the kind of a request."""
        bins = _bin(TEMPERATURES, request.temperature), _bin(OVERLAPS, request.overlap)
        prompt, limit = _bin(PROMPTS, request.prompt_tokens), request.max_tokens
        bits = 0 if limit is None else 1 + min(64, limit.bit_length())
        mode = (0 if request.thinking is None else 1 if request.thinking else 2) + (3 if request.restricted else 0)
        number = (((bits * 16 + prompt) * 8 + bins[0]) * 8 + bins[1]) * 8 + mode
        template = request.template if self._templates.get(request.template) else ""
        found = self._kinds.get((number, request.workload, template, request.client))
        if found is None:
            if len(self._kinds) >= _MOST_TEMPLATES:
                self._kinds = {}
            workload = f"{_NUMBERS[prompt]}/{_MODES[mode]}/{request.workload}"
            finest = _NAMES[bins[0]][bins[1]], workload, template, client_id(request.client) if request.client else ""
            # For lengths, a request is grouped by its prompt and limit, not by its bins.
            length = request.workload, f"{workload}/{_NUMBERS[bits - 1] if bits else ''}", *finest[2:]
            found = RequestKind(nested(finest), nested(length))
            self._kinds[number, request.workload, template, request.client] = found
        return found

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
    """Return the id of a client in keys."""
    return f"{crc32(client.encode()):08x}"


class Shares:
    """The weight of each client's answers in shared means: no client gets more than twice the others' mean weight."""

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


class Mean:
    """A mean of one arm in one group, as its sums."""

    __slots__ = ("count", "key", "total")

    def __init__(self) -> None:
        self.count = self.total = 0.0
        self.key: Key = ()  # in the statistics, once an answer had this group as its finest


class Group:
    """The means of a group, by arm; its key determines the enclosing groups."""

    __slots__ = ("around", "key", "means")

    def __init__(self, key: Key, larger: tuple[Group, ...]) -> None:
        self.key = key
        self.means: dict[str, Mean] = {}
        self.around = (*larger, self)  # largest first

    def mean(self, arm: str) -> Mean:
        """Return the mean of an arm, created if new."""
        mean = self.means.get(arm)
        if mean is None:
            mean = self.means[arm] = Mean()
        return mean


class Means:
    """Means by group and arm, from the answers of all gateways; own answers count immediately."""

    def __init__(self, table: Table, statistics: Statistics, most: float) -> None:
        self.table, self.statistics = table, statistics
        self._most = most  # bound on the means that other gateways report
        self.groups: dict[Key, Group] = {}
        self._version: tuple[int, int] = 0, 0

    def around(self, groups: Groups) -> tuple[Group, ...]:
        """Return the known groups, largest first; create new ones."""
        return _group(self.groups, groups).around

    def count(self, arm: str, key: Key) -> float:
        """Return the number of known answers of a group."""
        found = self.groups.get(key)
        mean = None if found is None else found.means.get(arm)
        return 0.0 if mean is None else mean.count

    def mean(self, arm: str, groups: Groups) -> float:
        """Return the mean of a request's groups, each shrunk towards the enclosing one's; 0 without answers.

        It changes nothing, and may be called from any thread.
        """
        known = self.groups
        return mean_of(arm, tuple([known[key] for key in groups if key in known]))

    def add(self, arm: str, groups: Groups, log: float, weight: float, own: float, now_s: float) -> None:
        """Add an answer, with its weight in groups that clients share, and in its client's own group."""
        around = self.around(groups)
        finest = around[-1].mean(arm)
        if not finest.key:
            finest.key = (arm, *groups[-1], *_EMPTY[len(groups[-1]) :])
        self.statistics.add_at(now_s, self.table, finest.key, (weight, weight * log, own, own * log))
        _add(around, arm, weight, weight * log, own, own * log)

    def is_due(self, now_s: float) -> bool:
        """Return whether others have reported anything, or an epoch has ended, since the last call."""
        version = self.statistics.told, int(now_s // self.table.epoch_s)
        is_due, self._version = version != self._version, version
        return is_due

    def read(self) -> dict[Key, Group]:
        """Return `groups` rebuilt from all sums; may be called from any thread."""
        groups: dict[Key, Group] = {}
        for key, (weight, log, own, own_log) in self.told():
            _add(_group(groups, nested(key[1:])).around, key[0], weight, log, own, own_log)
        return groups

    def take(self, groups: dict[Key, Group]) -> None:
        """Replace the groups by those read."""
        self.groups = groups

    def told(self) -> Iterator[tuple[Key, Sums]]:
        """Yield the sums of all gateways by arm and finest group, clipped to plausible values; from any thread."""
        for key, sums in self.statistics.buckets(self.table).items():
            if len(key) == _CLIENT + 1 and sums[0] >= 0.0 and sums[2] > 0.0:
                yield key, self._possible(sums)

    def _possible(self, sums: Sums) -> Sums:
        weight, log, own, own_log = sums
        most, most_own = self._most * weight, self._most * own
        return weight, min(max(-most, log), most), own, min(max(-most_own, own_log), most_own)


def without_client(finest: Key) -> tuple[str, str, str]:
    """Return bins, workload and template of the finest group; the template may be empty."""
    return finest[0], finest[1], finest[2] if len(finest) >= _TEMPLATE else ""


class Typical(NamedTuple):
    """Typical values of the requests of a group."""

    workload: str
    temperature: float
    prompt_tokens: float


def typical(kind: Key) -> Typical:
    """Return the typical values for a workload's group, or a smaller one."""
    prompt, _, name = kind[1].split("/")
    return Typical(name, _MIDDLES[kind[0]], _PROMPTS[prompt])


def is_kind(key: Key) -> bool:
    """Return whether a key, which another gateway may have written, is valid for `typical`."""
    prompt, *rest = key[1].split("/")
    return key[0] in _MIDDLES and prompt in _PROMPTS and len(rest) == 2 and bool(_NAMED(rest[1]))


def answers_of(statistics: Statistics) -> Iterator[tuple[str, Key, float, float]]:
    """Yield replicas with bins, workload and template of requests, and answers and their tokens; from any thread."""
    for (replica, *kind), (answers, tokens) in statistics.buckets(ANSWERS).items():
        if len(kind) == _TEMPLATE and is_kind((*kind,)) and min(answers, tokens) >= 0.0:
            yield replica, (*kind,), answers, tokens


def nested(finest: Key) -> Groups:
    """Return the groups that contain the finest, including it, as `Kinds` does."""
    groups = [(), finest[:1], finest[:2]]
    if finest[2]:
        groups.append(finest[:_TEMPLATE])
    if finest[3]:
        groups.append(finest)
    return tuple(groups)


def mean_of(arm: str, around: tuple[Group, ...]) -> float:
    """Return the mean of groups, see `Means.mean`."""
    mean = 0.0
    for group in around:
        found = group.means.get(arm)
        if found is not None:
            mean = (found.total + _LARGER * mean) / (found.count + _LARGER)
    return mean


def _group(known: dict[Key, Group], groups: Groups) -> Group:
    """Return the last of the groups; if there are too many, a new one is not kept."""
    key = groups[-1]
    found = known.get(key)
    if found is None:
        found = Group(key, _group(known, groups[:-1]).around if len(groups) > 1 else ())
        if len(known) < (_MOST_GROUPS if len(key) >= _TEMPLATE else 2 * _MOST_GROUPS):  # clients name workloads
            known[key] = found
    return found


def _add(around: tuple[Group, ...], arm: str, count: float, total: float, own: float, own_total: float) -> None:
    for group in around:
        if len(group.key) == _CLIENT:
            count, total = own, own_total
        mean = group.mean(arm)
        mean.count += count
        mean.total += total


_NAMES: Final = tuple(
    tuple(f"{temperature}/{overlap}" for overlap in range(len(OVERLAPS) + 1))
    for temperature in range(len(TEMPERATURES) + 1)
)
_NAMED: Final = re.compile(f"({WORKLOAD_NAME.pattern})?").fullmatch
_NUMBERS: Final = tuple(map(str, range(65)))
_MODES: Final = ("", "thinking", "plain", " restricted", "thinking restricted", "plain restricted")
_EMPTY: Final = ("", "", "", "")
_MIDDLES: Final = {name: middle for names, middle in zip(_NAMES, (0.0, 0.3, 0.7, 1.0), strict=True) for name in names}
_PROMPTS: Final = {str(number): tokens for number, tokens in enumerate((48.0, *[1.4 * bound for bound in PROMPTS]))}
"""Typical temperature, and prompt tokens, of each bin."""
_MOST_TEMPLATES: Final = 4096
_MOST_GROUPS: Final = 16_384
_MOST_SHARE: Final = 2.0
_RECENT: Final = 2000.0
