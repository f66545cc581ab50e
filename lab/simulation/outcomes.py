"""The outcomes of a trace's requests, for a table of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from backends.speculation import MODELLESS, Method
from lab.statistics import Floats
from lab.trace.record import Text, TraceRecord
from policies.features.request import TYPICAL_TOKENS, Endpoint

NO_OUTCOME = (-1, 0.0, 0, math.nan, math.nan, math.nan)
_ANSWERED = ("", "cancelled")
_WITHOUT_TEXT = (Endpoint.EMBEDDINGS, Endpoint.OTHER)
_NOTES = {
    "left out": "requests of the trace generate no text and are left out.",
    "failed": "had failed, and are played with what they got of an answer, at least a token.",
    "several": "ask for several answers, which are played as one as long as all of them.",
    "cached": "had tokens in a prefix cache, but no prefix_blocks: here none of theirs is cached.",
    "empty": "have no tokens in prompt or answer, and are played with one.",
    "no length": f"answers of unknown length have {TYPICAL_TOKENS} tokens, or max_tokens if fewer.",
}
_MOST_APPLICATIONS, _MOST_ACCEPTED = 1000, 64


class Outcomes(NamedTuple):
    """The outcomes of a trace's requests; arrays of shape (requests,)."""

    replicas: Sequence[tuple[str, str]]  # name and method of each that served any
    replica: npt.NDArray[np.int64]  # index; -1 if none served it
    sent_at: Floats
    prompt_tokens: Floats
    cached_tokens: Floats  # of the prompt, in the engine's prefix cache, as reported
    output_tokens: Floats
    ttft_s: Floats  # NaN for an answer in one piece
    e2e_s: Floats  # NaN unless it is the time of one sequence on one replica
    tokens_per_step: Floats  # NaN if the engine did not say

    @property
    def tpot_s(self) -> Floats:
        """Seconds per output token after the first; NaN if unknown."""
        later = np.where(self.output_tokens > 1, self.output_tokens - 1, math.nan)
        return (self.e2e_s - self.ttft_s) / later

    def index_of(self, name: str, method: str) -> int:
        """Return the index of a replica; an unused index if it served nothing."""
        return self.replicas.index((name, method)) if (name, method) in self.replicas else len(self.replicas)


class TableFacts:
    """What a table's requests share: names by number, and the tokens per step of replicas."""

    def __init__(self, default_temperature: float) -> None:
        self._default_temperature = default_temperature
        self._counted, self._of_methods = Counter[str](), Counter[str]()
        self.workloads: dict[str, int] = {}
        self.replicas: dict[tuple[str, str], int] = {}
        self.drafted: dict[str, int] = {}  # tokens that steps drafted, at most, by method
        # By method, and within it by template and workload, by workload, and overall.
        self.accepted: dict[str, dict[tuple[str, ...], list[float]]] = {}

    def is_played(self, record: TraceRecord) -> bool:
        """Count what a request lacks; return whether it generates text."""
        counted = self._counted
        if record.endpoint in _WITHOUT_TEXT:
            counted["left out"] += 1
            return False
        counted["played"] += 1
        drafting = [name for name in record.acceptance if name != Method.BASELINE]
        self._of_methods.update(drafting)
        counted["accepted"] += bool(drafting)
        counted["tokens"] += bool(record.text and record.text.exact)
        counted["failed"] += record.error not in _ANSWERED
        counted["several"] += record.n > 1
        counted["empty"] += record.error in _ANSWERED and 0 in (record.prompt_tokens, record.output_tokens)
        counted["cached"] += bool(record.cached_tokens and not record.prefix_blocks)
        counted["no length"] += record.output_tokens is None
        counted["no workload"] += not record.workload
        counted["no temperature"] += record.temperature is None
        return True

    @property
    def have_all_failed(self) -> bool:
        """Whether the trace has requests, of which none was answered."""
        return 0 < self._counted["played"] == self._counted["failed"]

    @property
    def assumed(self) -> list[str]:
        """The requests of the trace that were left out, and the assumptions about what the others lack."""
        counted = self._counted
        said = [f"{counted[what]:,} {is_so}" for what, is_so in _NOTES.items() if counted[what]]
        if min(counted["accepted"], counted["tokens"]) < counted["played"]:
            known = ", ".join(f"{name} {number:,}" for name, number in sorted(self._of_methods.items()))
            said.append(
                f"Of {counted['played']:,} requests {counted['accepted']:,} say which drafts were accepted"
                f"{known and f' ({known})'}, and "
                f"{counted['tokens']:,} have tokens, on which n-gram and suffix drafting run."
            )
            like = "others of the same application, or the calibration" if self.accepted else "the calibration"
            taken = [
                f"{what} ({counted[which]:,})"
                for which, what in (
                    ("no workload", "as in chat where no kind of text is named"),
                    ("no temperature", f"at temperature {self._default_temperature:g} where none is recorded"),
                )
                if counted[which]
            ]
            said.append(", ".join([f"Other drafts are accepted as by {like}", *taken]) + ".")
        return said

    def outcome_of(self, record: TraceRecord) -> tuple[Any, ...]:
        """Return a request's outcome, for its row."""
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
            record.cached_tokens or 0,
            ttft_s,
            e2e_s,
            math.nan if per_step is None else per_step,
        )

    def completed(
        self, acceptance: Mapping[str, Any], text: Text | None, template: str, workload: str, number: int
    ) -> Mapping[str, Any]:
        """Return the acceptance of a request, filled in from a similar request where its own is unknown.

        The similar request is one of the same application, else of the same workload, that the method served.
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
