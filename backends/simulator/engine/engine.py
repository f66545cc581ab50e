"""An engine with continuous batching: vLLM's scheduler, one iteration at a time, on a clock kept by the caller."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from backends.calibration.parameters import EngineParameters
from backends.drafting.script import BLOCK_TOKENS, Script
from backends.simulator.engine.kv_cache import BlockPool
from backends.simulator.engine.step import Admission, Counters, Emission, Ints, Step

__all__ = ["Admission", "Counters", "Emission", "Engine", "Step"]

N = TypeVar("N", int, Ints)
I = TypeVar("I", np.int32, np.int64)  # noqa: E741

# Rows of the table of running requests. Each column is one request, in order of admission.
_ID, _SLOT, _PROMPT, _OUTPUT, _SENT, _COMPUTED, _BLOCKS = range(7)


@dataclass(slots=True)
class _Request:
    """State of a request that is not in the table: its script and its shared blocks."""

    id: int
    script: Script
    sent: int = 0
    looked_up: bool = False
    shared: list[int] = field(default_factory=list)
    published: int = 0  # leading blocks that are already shared, by this request or another


class Engine:
    """The engine of one replica.

    The engine keeps no clock: the caller passes the start of a step, and the step gives its duration. Call `step` again
    when the step has ended; requests submitted or cancelled meanwhile are taken into account then. Requests that finish
    in a step leave the batch when the next step begins.

    Parameters
    ----------
    parameters
        Limits and step times.

    Examples
    --------
    >>> from backends.calibration.calibration import load_calibration
    >>> from backends.drafting.script import plain_steps
    >>> from backends.speculation import Method
    >>> engine = Engine(EngineParameters.of(load_calibration("llama-3.1-8b-h100"), Method.BASELINE))
    >>> request_id = engine.submit(Script(100, 2, *plain_steps(2)), now_s=0.0)
    >>> prefill = engine.step(0.0)
    >>> prefill.emissions
    [Emission(request_id=0, tokens=1, drafted=0, first=True, finished=False)]
    >>> engine.step(prefill.duration_s).emissions
    [Emission(request_id=0, tokens=1, drafted=0, first=False, finished=True)]
    """

    def __init__(self, parameters: EngineParameters) -> None:
        self.parameters = parameters
        self.counters = Counters(accepted_at=np.zeros(max(1, parameters.k), np.int64))
        self._pool = BlockPool(parameters.kv_blocks)
        self._waiting: deque[_Request] = deque()
        self._requests: dict[int, _Request] = {}  # waiting and running
        self._next_id = 0
        self._table = np.zeros((7, 16), np.int64)
        self._count = 0  # running requests: columns of the table in use
        self._slots: list[int] = []  # free rows of `_emitted` and `_drafted`
        self._emitted = np.ones((0, 64), np.int32)
        self._drafted = np.zeros((0, 64), np.int32)

    @property
    def running(self) -> int:
        """Number of requests in the batch."""
        return self._count

    @property
    def waiting(self) -> int:
        """Number of requests that are not in the batch yet, or were preempted."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache in use, 0 to 1."""
        return self._pool.used / self._pool.blocks

    def submit(self, script: Script, now_s: float) -> int:
        """Queue a request and return its id.

        Parameters
        ----------
        now_s
            Arrival, on the caller's clock. A step in progress does not include the request.

        Raises
        ------
        ValueError
            If the request is longer than `max_model_len`, or could never fit into the KV cache.
        """
        length = script.prompt_tokens + script.output_tokens
        if length > self.parameters.max_model_len:
            raise ValueError(
                f"{length} tokens of prompt and output exceed max_model_len {self.parameters.max_model_len}"
            )
        if _blocks(length + self.parameters.k) > self._pool.blocks:
            raise ValueError(f"{length} tokens do not fit into {self._pool.blocks} blocks of KV cache")
        request = _Request(self._next_id, script)
        self._next_id += 1
        self._requests[request.id] = request
        self._waiting.append(request)
        return request.id

    def cancel(self, request_id: int) -> None:
        """Drop a request and free its blocks at once; does nothing if it is unknown or finished."""
        request = self._requests.get(request_id)
        if request is None:
            return
        column = np.flatnonzero(self._table[_ID, : self._count] == request_id)
        if len(column):
            self._leave(np.isin(np.arange(self._count), column))
        else:
            self._waiting.remove(request)
            del self._requests[request_id]

    def step(self, now_s: float) -> Step | None:
        """Schedule and run one iteration that begins at `now_s`; return None if there is nothing to run."""
        table = self._table[:, : self._count]
        done = table[_SENT] >= table[_OUTPUT]
        if done.any():
            self.counters.finished += int(done.sum())
            self._leave(done)
        k = self._k()
        granted, preempted = self._continue_running(k)
        admitted: tuple[Admission, ...] = ()
        if self._waiting and not preempted:
            granted, admitted = self._admit(granted)
        if not self._count:
            return None
        return self._run(granted, k, admitted)

    def _k(self) -> int:
        """Return k for the current batch size."""
        by_batch = self.parameters.k_by_batch
        if not by_batch:
            return self.parameters.k
        return by_batch[min(self._count, len(by_batch) - 1)]

    def _continue_running(self, k: int) -> tuple[Ints, bool]:
        """Grant tokens to the requests in the batch, oldest first; preempt the newest ones if blocks run out."""
        granted = need = self._needed(k)
        if int(need.sum()) > self.parameters.max_num_batched_tokens:
            before = np.cumsum(need) - need
            granted = np.clip(self.parameters.max_num_batched_tokens - before, 0, need)
        table = self._table[:, : self._count]
        extra = np.maximum(_blocks(table[_COMPUTED] + granted) - table[_BLOCKS], 0)
        total = int(extra.sum())
        if total <= self._pool.free:
            self._pool.take(total)
            table[_BLOCKS] += extra
            return granted, False
        column = 0
        while column < self._count:
            while self._pool.free < extra[column] and column < self._count:
                self._preempt_newest()
            if column < self._count:
                self._pool.take(int(extra[column]))
                self._table[_BLOCKS, column] += extra[column]
            column += 1
        return granted[: self._count], True

    def _needed(self, k: int) -> Ints:
        """Return the tokens that each request in the batch would compute: the rest of its prefill, or drafts + 1."""
        table = self._table[:, : self._count]
        rest: Ints = table[_PROMPT] + table[_SENT] - table[_COMPUTED]
        decoding = (rest == 1) & (table[_SENT] > 0)
        if k == 0:
            return rest
        drafts = np.minimum(self._drafted[table[_SLOT], np.minimum(table[_SENT], table[_OUTPUT] - 1)], k)
        needed: Ints = np.where(decoding, drafts + 1, rest)
        return needed

    def _admit(self, granted: Ints) -> tuple[Ints, tuple[Admission, ...]]:
        """Admit from the queue in order of arrival while requests, tokens and blocks allow."""
        parameters, pool = self.parameters, self._pool
        budget = parameters.max_num_batched_tokens - int(granted.sum())
        granted_new: list[int] = []
        admitted = []
        while self._waiting and budget > 0 and self._count < parameters.max_num_seqs:
            request = self._waiting[0]
            length = request.script.prompt_tokens + request.sent
            # The last token is always computed, because its logits give the first output token.
            prefix = request.script.prefix_blocks[: (length - 1) // BLOCK_TOKENS] if parameters.prefix_caching else ()
            prefix = prefix[: pool.count_cached(prefix)]
            cached = len(prefix) * BLOCK_TOKENS
            tokens = min(length - cached, budget)
            private = _blocks(cached + tokens) - len(prefix)
            if private + pool.count_unused(prefix) > pool.free:
                break
            pool.share(prefix)
            pool.take(private)
            self._waiting.popleft()
            request.shared = list(prefix)
            request.published = len(prefix)
            if not request.looked_up:
                request.looked_up = True
                self.counters.prefix_queries += length
                self.counters.prefix_hits += cached
                self.counters.prompt_tokens += length
            self._enter(request, cached, len(prefix) + private)
            admitted.append(Admission(request.id, cached))
            granted_new.append(tokens)
            budget -= tokens
        if granted_new:
            granted = np.concatenate([granted, np.array(granted_new, np.int64)])
        return granted, tuple(admitted)

    def _run(self, granted: Ints, k: int, admitted: tuple[Admission, ...]) -> Step:
        """Advance every request by the tokens granted to it, and compute the duration of the step."""
        parameters, counters = self.parameters, self.counters
        table = self._table[:, : self._count]
        rest = table[_PROMPT] + table[_SENT] - table[_COMPUTED]
        emits = granted >= rest  # the other requests are still in their prefill, or got no tokens
        emits &= granted > 0
        drafted = np.where(emits, granted - rest, 0)
        positions = np.minimum(table[_SENT], table[_OUTPUT] - 1)
        tokens = np.where(emits, np.minimum(self._emitted[table[_SLOT], positions], drafted + 1), 0)

        batch_tokens = int(granted.sum())
        context_tokens = int(table[_COMPUTED][granted > 0].sum())
        verify_s = parameters.verify_s(batch_tokens, context_tokens)
        drafting_s = parameters.draft_s(k, int(emits.sum()), context_tokens, verify_s)
        duration_s = verify_s + parameters.step.overhead_s + drafting_s
        if drafting_s or drafted.any():
            duration_s += parameters.step.speculation_overhead_s

        # Only the accepted draft tokens stay in the KV cache.
        table[_COMPUTED] += np.where(emits, rest - 1 + tokens, granted)
        table[_SENT] += tokens
        if parameters.prefix_caching:
            self._publish(rest)
        accepted = tokens[drafted > 0] - 1
        counters.steps += 1
        counters.generation_tokens += int(tokens.sum())
        counters.drafts += len(accepted)
        counters.draft_tokens += int(drafted.sum())
        counters.accepted_tokens += int(accepted.sum())
        if len(accepted):
            reached = np.bincount(accepted, minlength=len(counters.accepted_at) + 1)[::-1].cumsum()[::-1]
            counters.accepted_at += reached[1:]
        return Step(
            duration_s=duration_s,
            request_ids=table[_ID][emits],
            tokens=tokens[emits],
            drafted=drafted[emits],
            sent=table[_SENT][emits],
            finished=(table[_SENT] >= table[_OUTPUT])[emits],
            admitted=admitted,
            batch_requests=int((granted > 0).sum()),
            batch_tokens=batch_tokens,
            context_tokens=context_tokens,
            k=k,
        )

    def _publish(self, rest: Ints) -> None:
        """Share the full blocks of the prefills that advanced."""
        table = self._table
        for column in (rest > 1).nonzero()[0].tolist():
            self._publish_one(self._requests[int(table[_ID, column])], int(table[_COMPUTED, column]))

    def _publish_one(self, request: _Request, computed: int) -> None:
        full = min(computed // BLOCK_TOKENS, len(request.script.prefix_blocks))
        for block in request.script.prefix_blocks[request.published : full]:
            if self._pool.publish(block):
                request.shared.append(block)
        request.published = max(request.published, full)

    def _enter(self, request: _Request, computed: int, blocks: int) -> None:
        """Put a request into the batch."""
        script = request.script
        if not self._slots:
            self._add_slots()
        if script.output_tokens > self._emitted.shape[1]:
            self._resize_steps(len(self._emitted), 1 << (script.output_tokens - 1).bit_length())
        if self._count == self._table.shape[1]:
            self._table = _enlarged(self._table, len(self._table), 2 * self._count)
        slot = self._slots.pop()
        self._emitted[slot, : script.output_tokens] = script.emitted
        self._drafted[slot, : script.output_tokens] = script.drafted
        self._table[:, self._count] = (
            request.id, slot, script.prompt_tokens, script.output_tokens, request.sent, computed, blocks
        )  # fmt: skip
        self._count += 1

    def _add_slots(self) -> None:
        old = len(self._emitted)
        new = max(16, 2 * old)
        self._resize_steps(new, self._emitted.shape[1])
        self._slots = list(range(new - 1, old - 1, -1))

    def _resize_steps(self, slots: int, output_tokens: int) -> None:
        self._emitted = _enlarged(self._emitted, slots, output_tokens)
        self._drafted = _enlarged(self._drafted, slots, output_tokens)

    def _preempt_newest(self) -> None:
        """Move the most recently admitted request back to the head of the queue, to be recomputed."""
        column = self._count - 1
        request = self._requests[int(self._table[_ID, column])]
        request.sent = int(self._table[_SENT, column])
        self.counters.preemptions += 1
        self._leave(np.arange(self._count) == column)
        self._requests[request.id] = request
        self._waiting.appendleft(request)

    def _leave(self, leaving: npt.NDArray[np.bool_]) -> None:
        """Remove requests from the batch and free their blocks."""
        table = self._table[:, : self._count]
        for column in np.flatnonzero(leaving).tolist():
            request = self._requests.pop(int(table[_ID, column]))
            if self.parameters.prefix_caching:
                self._publish_one(request, int(table[_COMPUTED, column]))
            self._pool.give_back(int(table[_BLOCKS, column]) - len(request.shared))
            self._pool.release(request.shared)
            request.shared = []
            self._slots.append(int(table[_SLOT, column]))
        stay = table[:, ~leaving]
        self._count = stay.shape[1]
        self._table[:, : self._count] = stay


def _blocks(tokens: N) -> N:
    """Return the number of blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


def _enlarged(table: npt.NDArray[I], rows: int, columns: int) -> npt.NDArray[I]:
    """Return a copy of a table with more rows and columns, filled with zeros."""
    larger = np.zeros((rows, columns), table.dtype)
    larger[: table.shape[0], : table.shape[1]] = table
    return larger
