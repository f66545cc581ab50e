"""Reading vLLM's `/metrics`, of any version that has the v1 engine.

Only a dozen of some hundred series are wanted, every two seconds from every replica, on the loop that relays
requests: one regular expression reads a page of 60 kB in about 0.3 ms, where a full parser takes 15.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

# As in vLLM's engine, without the `_total` that Prometheus adds to counters; older names on the right.
_NAMES = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "kv_usage",
    "gpu_cache_usage_perc": "kv_usage",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "num_preemptions": "preemptions",
    "prefix_cache_queries": "prefix_queries",
    "prefix_cache_hits": "prefix_hits",
    "spec_decode_num_drafts": "drafts",
    "spec_decode_num_draft_tokens": "draft_tokens",
    "spec_decode_num_accepted_tokens": "accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos": "per_position",
}
_SAMPLE = re.compile(
    rb"^vllm:(%s)(?:_total)?(\{.*\})?[ \t]+([0-9.eE+-]+|NaN|[+-]?Inf)[ \t]*\r?$" % "|".join(_NAMES).encode(),
    re.MULTILINE,
)
_POSITION = re.compile(rb'position="(\d+)"')


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """What one page says, summed over the engines behind it (data parallelism); `kv_usage` is their mean, 0 to 1.

    Parameters
    ----------
    drafts, draft_tokens, accepted_tokens
        Steps that drafted, tokens drafted and tokens accepted since the engine started; 0 on a baseline.
    accepted_per_position
        Accepted tokens by draft position, shape (k,).
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens since the engine started; None if it never drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """Accepted + 1, over the steps that drafted; None if it never drafted."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else None


def read_metrics(page: bytes) -> EngineMetrics | None:
    """Read a page of vLLM's metrics.

    Returns
    -------
    EngineMetrics or None
        None if the page holds none of vLLM's gauges: it is not vLLM's, or it is broken.
    """
    sums: dict[str, float] = {}
    per_position: dict[int, float] = {}
    engines = 0
    for name, labels, number in _SAMPLE.findall(page):
        try:
            value = float(number)
        except ValueError:
            continue  # "1.2.3": the expression is looser than the grammar
        if not math.isfinite(value):
            continue
        field = _NAMES[name.decode()]
        if field == "per_position":
            position = _POSITION.search(labels)
            if position is not None:
                per_position[int(position[1])] = per_position.get(int(position[1]), 0.0) + value
            continue
        sums[field] = sums.get(field, 0.0) + value
        engines += field == "running"
    if not engines:
        return None
    kv_usage = sums.pop("kv_usage", 0.0) / engines
    counts = {field: int(value) for field, value in sums.items()}
    return EngineMetrics(
        **counts,
        kv_usage=kv_usage,
        accepted_per_position=tuple(int(per_position[position]) for position in sorted(per_position)),
    )
