"""Parser of vLLM's `/metrics`, for every version with the v1 engine.

The gateway needs a dozen of about a hundred series, every two seconds from every replica, on the event loop that relays
requests. One regular expression reads a page of 60 kB in about 0.3 ms; a full parser takes 15 ms. `MetricsReader` reads
any page in parts, each of which blocks the event loop for at most about 5 ms, even if it is not vLLM's.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any, Final

from backends.reported import MOST_COUNT, finite

# vLLM's series, without the `_total` that Prometheus adds to counters, and their fields of `EngineMetrics`.
_NAMES = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "kv_usage",
    "gpu_cache_usage_perc": "kv_usage",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "prefix_cache_queries": "prefix_queries",
    "prefix_cache_hits": "prefix_hits",
    "spec_decode_num_drafts": "drafts",
    "spec_decode_num_draft_tokens": "draft_tokens",
    "spec_decode_num_accepted_tokens": "accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos": "per_position",
    # Histogram counts: vLLM observes both once per sequence and step.
    "time_to_first_token_seconds_count": "first_steps",
    "inter_token_latency_seconds_count": "later_steps",
    "time_per_output_token_seconds_count": "later_steps_before",  # its name before vLLM 0.11
}
# Series of which one labeled sample counts: its label, and the field.
_LABELLED = {
    "engine_sleep_state": (b'sleep_state="awake"', "awake"),
    "sleep_mode_operation_duration_seconds_count": (b'operation="wake"', "wake_ups"),
    "cache_config_info": (b'enable_prefix_caching="True"', "prefix_caching"),
    "rl_weight_update_operation_duration_seconds_count": (b'operation="', "reloads"),
}
_REST: Final = rb"(?:[ \t]{1,8}[0-9.eE+-]{1,32})?[ \t]{0,8}(?:#.*)?\r?$"
"""After the value: a time, which some exporters add, and an OpenMetrics exemplar."""
_SAMPLE = re.compile(
    rb"^vllm:(%b)(?:_total)?(\{[^}\n]*\}(?:[^}\n]*\})*?)?[ \t]{1,8}([0-9.eE+-]{1,32}|NaN|[+-]?Inf)%b"
    % ("|".join((*_NAMES, *_LABELLED)).encode(), _REST),
    re.MULTILINE,
)
_STARTED = re.compile(rb"process_start_time_seconds[ \t]{1,8}([0-9.eE+]{1,32})%b" % _REST, re.MULTILINE)
_KV_TOKENS = re.compile(rb'[{,]kv_cache_size_tokens="(\d{1,15})"')
_KV_BLOCKS = re.compile(rb'[{,]num_gpu_blocks="(\d{1,15})"')
_BLOCK_TOKENS = re.compile(rb'[{,]block_size="(\d{1,6})"')
_POSITION = re.compile(rb'position="(\d{1,3})"')

MOST_PAGE_BYTES: Final = 2 << 20
"""Size up to which a page is read; a page of 16 engines has about 1 MB."""
_MOST_LINE_BYTES: Final = 1 << 16
_MOST_SAMPLES: Final = 8192
"""Samples read from a page; a page of 16 engines has about 500."""
_MOST_REQUESTS: Final = 1_000_000
_MOST_OF: Final = {"running": _MOST_REQUESTS, "waiting": _MOST_REQUESTS, "kv_usage": 1.0}
"""Largest plausible values of what an engine reports, where it differs from that of counters."""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """The values of one metrics page, summed over its engines (data parallelism).

    Examples
    --------
    >>> EngineMetrics(first_steps=10, later_steps=190).steps
    200
    """

    engines: int = 1
    # running, waiting: requests in the batch and in the queue.
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # share of the KV cache in use, 0 to 1; the mean over the engines
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    # drafts, draft_tokens, accepted_tokens: steps that drafted, tokens drafted and tokens accepted since the engine
    # started; 0 on a baseline.
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    # Accepted tokens by draft position, shape (k,): vLLM lists all k positions from the start.
    accepted_per_position: tuple[int, ...] = ()
    # Whether the engine was started with speculation: only then does it count drafts. None if its version cannot tell.
    speculates: bool | None = None
    # first_steps, later_steps: steps that gave the first token of a sequence, and later steps, each counted once per
    # sequence; `later_steps` is None if the server does not say.
    first_steps: int = 0
    later_steps: int | None = None
    started_s: float = 0.0  # unix time at which the server process started; 0 if it does not say
    awake: int | None = None  # engines that are not in sleep mode; None if the server does not say
    prefix_caching: int | None = None  # engines with a prefix cache; None if the server does not say
    kv_tokens: int = 0  # tokens that the KV cache holds; 0 if the server does not say
    # wake_ups, reloads: wake-ups from sleep mode, and operations that replaced weights.
    wake_ups: int = 0
    reloads: int = 0
    # Names of fields whose impossible value was ignored, sorted.
    ignored: tuple[str, ...] = ()

    @property
    def steps(self) -> int | None:
        """Steps that gave tokens, with or without drafts, counted once per sequence; None if unknown."""
        return None if self.later_steps is None else self.first_steps + self.later_steps


def total(pages: Sequence[EngineMetrics]) -> EngineMetrics:
    """Return the sum of several engines' pages; a field that one of them lacks is unknown.

    Examples
    --------
    >>> total([EngineMetrics(running=1, kv_usage=0.2), EngineMetrics(running=2, kv_usage=0.4, drafts=5)]).running
    3
    """
    columns = {field.name: [getattr(page, field.name) for page in pages] for field in fields(EngineMetrics)}
    accepted, ignored = columns.pop("accepted_per_position"), columns.pop("ignored")
    sums: dict[str, Any] = {name: None if None in column else sum(column) for name, column in columns.items()}
    return EngineMetrics(
        **sums
        | {
            "kv_usage": sums["kv_usage"] / len(pages),
            "speculates": None if sums["speculates"] is None else sums["speculates"] > 0,
            "accepted_per_position": tuple(map(sum, zip_longest(*accepted, fillvalue=0))),
            "ignored": tuple(sorted(set().union(*ignored))),
        }
    )


class MetricsReader:
    r"""Incremental parser of a page of vLLM's metrics.

    Examples
    --------
    >>> reader = MetricsReader()
    >>> reader.feed(b"vllm:num_requests_running 3.0\nvllm:num_requests_wai")
    >>> reader.feed(b"ting 2.0\n")
    >>> reader.metrics().waiting
    2
    """

    def __init__(self) -> None:
        self._rest = b""
        self._sums: dict[str, float] = {}
        self._per_position: dict[int, float] = {}
        self._ignored: set[str] = set()
        self._engines = self._samples = 0
        self._speculates: bool | None = None
        self._started_s = 0.0

    def feed(self, part: bytes) -> None:
        """Read the lines that a part completes; skip lines of over 64 KiB."""
        part = self._rest + part
        end = part.rfind(b"\n") + 1
        self._read(part[:end])
        self._rest = part[end:] if len(part) - end <= _MOST_LINE_BYTES else b""

    def metrics(self) -> EngineMetrics | None:
        """Return the values of the page once it has been fed completely; see `read_metrics`."""
        self._read(self._rest)
        self._rest = b""
        if not self._engines:
            return None
        sums = self._sums
        kv_usage = min(1.0, sums.pop("kv_usage", 0.0) / self._engines)
        later_steps_before = sums.pop("later_steps_before", None)
        if later_steps_before is not None:
            sums.setdefault("later_steps", later_steps_before)
        counts = {field: int(min(value, _MOST_OF.get(field, MOST_COUNT))) for field, value in sums.items()}
        return EngineMetrics(
            **counts,
            engines=self._engines,
            kv_usage=kv_usage,
            speculates=self._speculates,
            started_s=self._started_s,
            accepted_per_position=tuple(int(count) for _, count in sorted(self._per_position.items())),
            ignored=tuple(sorted(self._ignored)),
        )

    def _read(self, lines: bytes) -> None:
        sums, per_position = self._sums, self._per_position
        self._started_s = self._started_s or _started_s(lines)
        for sample in _SAMPLE.finditer(lines):
            if self._samples == _MOST_SAMPLES:
                self._ignored.add("samples")
                break
            self._samples += 1
            name, labels, text = sample.groups(b"")
            series = name.decode()
            label, field = _LABELLED.get(series) or (b"", _NAMES.get(series, ""))
            self._engines += field == "running"
            try:
                value = finite(float(text), _MOST_OF.get(field, MOST_COUNT))
            except ValueError:
                continue  # e.g. "1.2.3": the pattern is looser than the grammar
            if value is None:
                if text != b"NaN":  # a ratio of nothing
                    self._ignored.add(field)
                continue
            if field == "drafts" or (self._speculates is None and series == "kv_cache_usage_perc"):
                self._speculates = field == "drafts"  # the draft counters predate this name of the gauge
            if field == "per_position":
                position = _POSITION.search(labels)
                if position is not None:
                    per_position[int(position[1])] = per_position.get(int(position[1]), 0.0) + value
                continue
            sums[field] = sums.get(field, 0.0) + (value if label in labels else 0.0)
            if field == "prefix_caching":
                sums["kv_tokens"] = sums.get("kv_tokens", 0.0) + _kv_tokens(labels)


def read_metrics(page: bytes) -> EngineMetrics | None:
    r"""Parse a page of vLLM's metrics.

    Examples
    --------
    >>> page = b'vllm:num_requests_running{engine="0"} 3.0\nvllm:kv_cache_usage_perc{engine="0"} 0.25'
    >>> metrics = read_metrics(page)
    >>> metrics.running, metrics.kv_usage
    (3, 0.25)
    >>> read_metrics(b"<html>") is None
    True
    """
    reader = MetricsReader()
    reader.feed(page)
    return reader.metrics()


def _kv_tokens(labels: bytes) -> int:
    """Return the tokens that an engine's KV cache holds, from its labels; 0 if they do not say."""
    if (tokens := _KV_TOKENS.search(labels)) is not None:
        return int(tokens[1])
    blocks, size = _KV_BLOCKS.search(labels), _BLOCK_TOKENS.search(labels)
    return int(blocks[1]) * int(size[1]) if blocks is not None and size is not None else 0


def _started_s(lines: bytes) -> float:
    """Return the start time of the process; 0 if the lines do not say."""
    name = b"process_start_time_seconds "  # finding it is ten times as fast as a pattern over the whole page
    at = 0 if lines.startswith(name) else lines.find(b"\n" + name) + 1
    found = _STARTED.match(lines, at)
    try:
        return finite(float(found[1]), MOST_COUNT) or 0.0 if found is not None else 0.0
    except ValueError:
        return 0.0


WINDOW_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class CountedAcceptance:
    """The acceptance that an engine counted between two readings.

    Examples
    --------
    >>> before = EngineMetrics(generation_tokens=400, drafts=100, draft_tokens=300, accepted_tokens=150)
    >>> now = EngineMetrics(generation_tokens=1000, drafts=200, draft_tokens=600, accepted_tokens=350)
    >>> found = CountedAcceptance.between(before, now)
    >>> found.tokens_per_step, round(found.rate, 3)
    (1.5, 0.667)
    """

    tokens_per_step: float  # output tokens per engine step of a request, including steps without drafts
    rate: float | None  # accepted over drafted tokens; None if nothing was drafted
    by_position: tuple[float, ...]  # share of the drafts that were accepted at least up to each position, shape (k,)

    @classmethod
    def between(cls, before: EngineMetrics | None, now: EngineMetrics | None) -> CountedAcceptance | None:
        """Return the acceptance between two readings; None if there was no output, or the engine does not count it.

        For engines that do not count steps, tokens give them: a step emits its accepted tokens and one more. The last
        step of an answer may accept more tokens than the answer still needs.
        """
        if before is None or now is None or (tokens := now.generation_tokens - before.generation_tokens) <= 0:
            return None
        drafts = now.drafts - before.drafts
        drafted, accepted = now.draft_tokens - before.draft_tokens, now.accepted_tokens - before.accepted_tokens
        steps = tokens - accepted
        if now.steps is not None and before.steps is not None:
            steps = now.steps - before.steps
        earlier = (*before.accepted_per_position, *[0] * len(now.accepted_per_position))
        positions = zip(now.accepted_per_position, earlier, strict=False)
        return cls(
            tokens / max(1, steps, drafts),
            accepted / drafted if drafted else None,
            tuple((after - then) / drafts for after, then in positions) if drafts else (),
        )


class AcceptanceOfLate:
    """The acceptance of an engine over the last minute."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, EngineMetrics]] = deque()

    def add(self, engine: EngineMetrics, now_s: float) -> None:
        """Add a reading."""
        readings = self._readings
        while len(readings) > 1 and readings[0][0] < now_s - WINDOW_S:
            readings.popleft()
        readings.append((now_s, engine))

    def at(self, now_s: float) -> CountedAcceptance | None:
        """Return the acceptance of the minute before a time; None if the engine gave no output in it."""
        if not self._readings or self._readings[-1][0] < now_s - WINDOW_S:
            return None
        return CountedAcceptance.between(self._readings[0][1], self._readings[-1][1])
