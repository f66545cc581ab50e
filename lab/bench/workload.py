"""The workload of one run: the prompt and send time of every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import numpy as np

from lab.bench.arrivals import Arrival, gamma_arrivals, shorten
from lab.bench.prompts import Prompt, TokenScale, synthetic_text
from lab.bench.settings import BenchSettings

DEFAULT_OUTPUT_TOKENS = (128, 128)


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a run.

    Examples
    --------
    >>> str(Load("rate", 4.0)), str(Load("concurrency", 16))
    ('4 req/s', '16 at once')
    """

    kind: Literal["rate", "trace", "concurrency"]
    value: float  # requests per second for `rate` and `trace`; concurrent requests for `concurrency`

    def __str__(self) -> str:
        """Return the load with its unit."""
        return f"{self.value:g} at once" if self.kind == "concurrency" else f"{self.value:.3g} req/s"


class Workload:
    """The requests of one run; the same for every target that is compared."""

    def __init__(
        self,
        settings: BenchSettings,
        load: Load,
        cell: int,
        *,
        scale: TokenScale,
        prompts: Sequence[Prompt] | None = None,
        trace: Sequence[Arrival] | None = None,
        context_tokens: int | None = None,
    ) -> None:
        self._settings = settings
        self._scale = scale
        # Index of the combination of temperature and load. Each has its own prompts, so that no run profits from what
        # an earlier one left in the prefix cache or the suffix tree.
        self._cell = cell
        # Prompts of a dataset; None for synthetic prompts.
        self._prompts = list(prompts) if prompts is not None else None
        if self._prompts is not None:
            Random(f"{settings.seed}/order").shuffle(self._prompts)
        self._trace: list[Arrival] | None = None
        self.left_out = 0  # number of requests of the trace that are too long for the engine
        self.arrivals_s: list[float] | None = None  # send times in seconds from the start; None in a closed loop
        if trace is not None:
            self._take_trace(list(trace), load, context_tokens)
        elif load.kind == "rate":
            random = np.random.default_rng([settings.seed, cell])
            self.arrivals_s = gamma_arrivals(
                load.value, settings.burstiness, random, settings.count, settings.duration_s
            )

    @property
    def size(self) -> int | None:
        """Number of requests; None if only time limits the run."""
        return len(self.arrivals_s) if self.arrivals_s is not None else self._settings.count

    @property
    def repeats(self) -> bool:
        """Whether the dataset has fewer prompts than this run and earlier ones send."""
        per_run = self.size or 0
        return self._prompts is not None and per_run * (self._cell + 1) > len(self._prompts)

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of request `index`; negative indices are for warm-up and have their own prompts."""
        if self._prompts is not None:
            return self._prompts[(self._cell * (self.size or 0) + index) % len(self._prompts)]
        random = Random(f"{self._settings.seed}/{self._cell}/{index}")
        if self._trace is not None and index >= 0:
            input_tokens, output_tokens = self._trace[index].input_tokens, self._trace[index].output_tokens
        else:
            input_tokens = random.randint(*self._settings.input_tokens)
            output_tokens = random.randint(*(self._settings.output_tokens or DEFAULT_OUTPUT_TOKENS))
        text = synthetic_text(self._settings.prompts, random, self._scale.words(input_tokens))
        return Prompt(text, output_tokens=output_tokens)

    def _take_trace(self, trace: list[Arrival], load: Load, context_tokens: int | None) -> None:
        settings = self._settings
        arrivals = shorten(trace, load.value, settings.count, settings.duration_s)
        if self._prompts is None and context_tokens is not None:
            most = 0.95 * context_tokens  # prompts may be a little longer than they should
            fitting = [arrival for arrival in arrivals if arrival.input_tokens + arrival.output_tokens <= most]
            self.left_out = len(arrivals) - len(fitting)
            arrivals = fitting
        self._trace = arrivals
        self.arrivals_s = [arrival.at_s for arrival in arrivals]


def mean_rate(trace: Sequence[Arrival]) -> float:
    """Return the mean requests per second of a trace."""
    return (len(trace) - 1) / trace[-1].at_s if len(trace) > 1 and trace[-1].at_s > 0 else 1.0
