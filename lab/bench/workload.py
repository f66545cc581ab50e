"""What is sent in one run: the prompt of every request, and when it goes out."""

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
    """How requests follow each other.

    Parameters
    ----------
    value
        Requests per second of a `rate` or a `trace`; requests under way at all times of a `concurrency`.
    """

    kind: Literal["rate", "trace", "concurrency"]
    value: float

    def __str__(self) -> str:
        """Return it for a person: `4 req/s`, `16 at once`."""
        return f"{self.value:g} at once" if self.kind == "concurrency" else f"{self.value:.3g} req/s"


class Workload:
    """The requests of one run; the same for every target that is compared.

    Parameters
    ----------
    cell
        Number of the combination of temperature and load. Each has prompts of its own, so that no run finds what an
        earlier one left in the prefix cache or the suffix tree.
    prompts
        Read from a file; None makes them.
    context_tokens
        The longest context that the engine takes; requests of a trace that are longer are left out.

    Attributes
    ----------
    arrivals_s
        When each request goes out, seconds from the start; None in a closed loop.
    left_out
        Requests of the trace that the engine could not take.
    """

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
        self._cell = cell
        self._prompts = list(prompts) if prompts is not None else None
        if self._prompts is not None:
            Random(f"{settings.seed}/order").shuffle(self._prompts)
        self._trace: list[Arrival] | None = None
        self.left_out = 0
        self.arrivals_s: list[float] | None = None
        if trace is not None:
            self._take_trace(list(trace), load, context_tokens)
        elif load.kind == "rate":
            random = np.random.default_rng([settings.seed, cell])
            self.arrivals_s = gamma_arrivals(
                load.value, settings.burstiness, random, settings.count, settings.duration_s
            )

    @property
    def size(self) -> int | None:
        """How many requests there are; None if only time ends the run."""
        return len(self.arrivals_s) if self.arrivals_s is not None else self._settings.count

    @property
    def repeats(self) -> bool:
        """Whether the file has fewer prompts than this and the earlier runs send."""
        per_run = self.size or 0
        return self._prompts is not None and per_run * (self._cell + 1) > len(self._prompts)

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of request `index`; one below 0 is for warming up, and occurs nowhere else."""
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
        taken = shorten(trace, load.value, settings.count, settings.duration_s)
        if self._prompts is None and context_tokens is not None:
            fitting = [one for one in taken if one.input_tokens + one.output_tokens <= 0.95 * context_tokens]
            self.left_out = len(taken) - len(fitting)  # 5 % are for the error of the length
            taken = fitting
        self._trace = taken
        self.arrivals_s = [one.at_s for one in taken]


def mean_rate(trace: Sequence[Arrival]) -> float:
    """Return a trace's requests per second."""
    return (len(trace) - 1) / trace[-1].at_s if len(trace) > 1 and trace[-1].at_s > 0 else 1.0
