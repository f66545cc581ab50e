"""An engine with continuous batching, iteration by iteration: vLLM's scheduler over a clock that the caller keeps."""

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

# Rows of the table of running requests; its columns are the requests, in the order they were admitted.
_ID, _SLOT, _PROMPT, _OUTPUT, _SENT, _COMPUTED, _BLOCKS = range(7)


@dataclass(slots=True)
class _Request:
    """What the table does not hold of a request: its script, and the shared blocks it uses."""

    id: int
    script: Script
    sent: int = 0
    looked_up: bool = False
    shared: list[int] = field(default_factory=list)
    published: int = 0  # leading blocks that are shared already, its own or another's


class Engine:
    """One replica. It keeps no clock: the caller says when a step begins, and the step says how long it takes.

    Call `step` again when the step has ended; what is submitted or cancelled meanwhile takes effect then. Requests
    that finish in a step leave the batch when the next one begins.

    Parameters
    ----------
    parameters
        Limits and step times.
    """

    def __init__(self, parameters: EngineParameters) -> None:
        self.parameters = parameters
        self.counters = Counters(accepted_at=np.zeros(max(1, parameters.k), np.int64))
        self._pool = BlockPool(parameters.kv_blocks)
        self._waiting: deque[_Request] = deque()
        self._requests: dict[int, _Request] = {}  # waiting and running
        self._next_id = 0
        self._table = np.zeros((7, 16), np.int64)
        self._count = 0  # of running requests: the table's columns in use
        self._slots: list[int] = []  # of the steps tables, free
        self._emitted = np.ones((0, 64), np.int32)
        self._drafted = np.zeros((0, 64), np.int32)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return self._count

    @property
    def waiting(self) -> int:
        """Requests not yet in the batch, or preempted."""
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
            When it arrives, on the caller's clock. A step that is under way does not see it.

        Raises
        ------
        ValueError
            If it is longer than `max_model_len`, or could never fit into the KV cache.
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
        """Drop a request and free what it holds at once; one that is unknown or finished is no error."""
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
        """Schedule and run one iteration that begins at `now_s`; None when there is nothing to run."""
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
        """Return k for the requests in the batch."""
        by_batch = self.parameters.k_by_batch
        if not by_batch:
            return self.parameters.k
        return by_batch[min(self._count, len(by_batch) - 1)]

    def _continue_running(self, k: int) -> tuple[Ints, bool]:
        """Grant tokens to the requests in the batch, oldest first; preempt the newest where blocks run out."""
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
        """Return the tokens each request of the batch would compute: its prefill's rest, or its drafts and one."""
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
        more: list[int] = []
        admitted = []
        while self._waiting and budget > 0 and self._count < parameters.max_num_seqs:
            request = self._waiting[0]
            length = request.script.prompt_tokens + request.sent
            # The last token is always computed: its logits are what the first output token comes from.
            prefix = request.script.prefix_blocks[: (length - 1) // BLOCK_TOKENS] if parameters.prefix_caching else ()
            prefix = prefix[: pool.known(prefix)]
            cached = len(prefix) * BLOCK_TOKENS
            tokens = min(length - cached, budget)
            private = _blocks(cached + tokens) - len(prefix)
            if private + pool.unused(prefix) > pool.free:
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
            more.append(tokens)
            budget -= tokens
        return (np.concatenate([granted, np.array(more, np.int64)]) if more else granted), tuple(admitted)

    def _run(self, granted: Ints, k: int, admitted: tuple[Admission, ...]) -> Step:
        """Compute what was granted: move every request on, and time the step."""
        parameters, counters = self.parameters, self.counters
        table = self._table[:, : self._count]
        rest = table[_PROMPT] + table[_SENT] - table[_COMPUTED]
        speaks = granted >= rest  # the others are in the midst of their prefill, or got no tokens
        speaks &= granted > 0
        drafted = np.where(speaks, granted - rest, 0)
        at = np.minimum(table[_SENT], table[_OUTPUT] - 1)
        tokens = np.where(speaks, np.minimum(self._emitted[table[_SLOT], at], drafted + 1), 0)

        batch_tokens = int(granted.sum())
        context_tokens = int(table[_COMPUTED][granted > 0].sum())
        verify_s = parameters.verify_s(batch_tokens, context_tokens)
        drafting_s = parameters.draft_s(k, int(speaks.sum()), context_tokens, verify_s)
        duration_s = verify_s + parameters.step.overhead_s + drafting_s
        if drafting_s or drafted.any():
            duration_s += parameters.step.speculation_overhead_s

        # Of drafted tokens only the accepted ones stay in the KV cache.
        table[_COMPUTED] += np.where(speaks, rest - 1 + tokens, granted)
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
            request_ids=table[_ID][speaks],
            tokens=tokens[speaks],
            drafted=drafted[speaks],
            sent=table[_SENT][speaks],
            finished=(table[_SENT] >= table[_OUTPUT])[speaks],
            admitted=admitted,
            batch_requests=int((granted > 0).sum()),
            batch_tokens=batch_tokens,
            context_tokens=context_tokens,
            k=k,
        )

    def _publish(self, rest: Ints) -> None:
        """Let others share the full blocks of the prefills that moved on."""
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
        """Send the request that was admitted last back to the head of the queue; it will be computed again."""
        column = self._count - 1
        request = self._requests[int(self._table[_ID, column])]
        request.sent = int(self._table[_SENT, column])
        self.counters.preemptions += 1
        self._leave(np.arange(self._count) == column)
        self._requests[request.id] = request
        self._waiting.appendleft(request)

    def _leave(self, who: npt.NDArray[np.bool_]) -> None:
        """Take requests out of the batch and free what they hold."""
        table = self._table[:, : self._count]
        for column in np.flatnonzero(who).tolist():
            request = self._requests.pop(int(table[_ID, column]))
            if self.parameters.prefix_caching:
                self._publish_one(request, int(table[_COMPUTED, column]))
            self._pool.give_back(int(table[_BLOCKS, column]) - len(request.shared))
            self._pool.release(request.shared)
            request.shared = []
            self._slots.append(int(table[_SLOT, column]))
        stay = table[:, ~who]
        self._count = stay.shape[1]
        self._table[:, : self._count] = stay


def _blocks(tokens: N) -> N:
    """Return the blocks that hold `tokens`."""
    return -(-tokens // BLOCK_TOKENS)


def _enlarged(table: npt.NDArray[I], rows: int, columns: int) -> npt.NDArray[I]:
    """Return a table with more rows and columns, the new ones 0."""
    larger = np.zeros((rows, columns), table.dtype)
    larger[: table.shape[0], : table.shape[1]] = table
    return larger
