"""What became of the requests of a trace, for a table of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from backends.speculation import MODELLESS, Method
from lab.statistics import Floats
from lab.trace.record import Text, TraceRecord

NO_OUTCOME = (-1, 0.0, math.nan, math.nan, math.nan)
_ANSWERED = ("", "cancelled")
_MOST_APPLICATIONS, _MOST_ACCEPTED = 1000, 64


class Outcomes(NamedTuple):
    """What became of the requests of a trace; arrays of shape (requests,)."""

    replicas: Sequence[tuple[str, str]]  # name and method of each that served some
    replica: npt.NDArray[np.int64]  # index, -1 if none has served it
    sent_at: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    ttft_s: Floats  # NaN of an answer in one piece
    e2e_s: Floats  # NaN if it is not the time of one sequence on one replica
    tokens_per_step: Floats  # NaN if the engine did not say

    @property
    def tpot_s(self) -> Floats:
        """Seconds per output token after the first; NaN if unknown."""
        later = np.where(self.output_tokens > 1, self.output_tokens - 1, math.nan)
        return (self.e2e_s - self.ttft_s) / later

    def index_of(self, name: str, method: str) -> int:
        """Return the index of a replica; one that no replica has, if it served nothing."""
        return self.replicas.index((name, method)) if (name, method) in self.replicas else len(self.replicas)


class TableFacts:
    """What the requests of a table share: names by their numbers, and the tokens per step that replicas had."""

    def __init__(self) -> None:
        self.workloads: dict[str, int] = {}
        self.replicas: dict[tuple[str, str], int] = {}
        # By method, and by template and workload, by workload, and by neither.
        self.accepted: dict[str, dict[tuple[str, ...], list[float]]] = {}

    def outcome_of(self, record: TraceRecord) -> tuple[Any, ...]:
        """Return what became of a request, for its row."""
        if record.error not in _ANSWERED or not record.output_tokens:
            return NO_OUTCOME
        per_step, method = record.tokens_per_step, record.method
        if per_step is not None and method != Method.BASELINE:
            by_application = self.accepted.setdefault(method, {})
            for key in ((record.template, record.workload), (record.workload,), ()):
                if key in by_application or len(by_application) < _MOST_APPLICATIONS:
                    drawn = by_application.setdefault(key, [])
                    if len(drawn) < _MOST_ACCEPTED:
                        drawn.append(per_step)
        own = record.n == 1 and not record.retried_from and not record.rescued_from
        ttft_s, e2e_s = (math.nan if each is None or not own else each for each in (record.ttft_s, record.e2e_s))
        return (
            self.replicas.setdefault((record.backend, method), len(self.replicas)),
            record.waited_s or 0.0,
            ttft_s,
            e2e_s,
            math.nan if per_step is None else per_step,
        )

    def completed(
        self, acceptance: Mapping[str, Any], text: Text | None, template: str, workload: str, number: int
    ) -> Mapping[str, Any]:
        """Return the acceptance of a request with that of another one like it where its own is not known.

        The request is one of the same application, else of the same workload, that the method has served.
        """
        missing = [name for name in self.accepted if name not in acceptance]
        if text is not None and text.exact:  # the proposer itself runs
            missing = [name for name in missing if name not in MODELLESS]
        if not missing:
            return acceptance
        completed = dict(acceptance)
        for name in missing:
            known = self.accepted[name]
            alike = known.get((template, workload)) or known.get((workload,)) or known[()]
            completed[name] = alike[number % len(alike)]
        return completed
