"""Engines that advance together in virtual time, or one engine that its caller steps."""

from __future__ import annotations

import fcntl
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from backends.calibration.draft_profile import DraftProfile
from backends.drafting.script import BLOCK_TOKENS, Script, plain_steps
from backends.simulator.engine import choice, kernel
from backends.simulator.engine.arena import Arena
from backends.simulator.engine.replica import Completion, SimulatedReplica
from backends.simulator.engine.state import (
    COUNTERS,
    DRAWN,
    NODE,
    NONE,
    PROFILE,
    REPLICA,
    REQUEST,
    UNCUT,
    FleetState,
    Records,
    replica_record,
)
from backends.simulator.engine.step import Admission, Counters, Emission, EngineStep

__all__ = ["Completion", "Counters", "EngineStep", "Fleet", "SimulatedReplica", "load_rules"]

_UNSTARTED = (0,) * (len(REQUEST.names or ()) - 17)


class Fleet:
    """Engines that advance together in virtual time.

    A request's random draws depend only on `seed` and its id, not on its replica or the load. Policies that get the
    same requests in the same order are therefore compared on the same draws.

    Examples
    --------
    >>> from backends.calibration.load import load_calibration
    >>> from backends.speculation import Method
    >>> calibration = load_calibration("llama-3.1-8b-h100")
    >>> fleet = Fleet([SimulatedReplica(name, calibration, Method.BASELINE) for name in "ab"])
    >>> request_id = fleet.submit(0, prompt_tokens=100, output_tokens=20, arrived_s=0.0)
    >>> [completion] = fleet.advance(math.inf)
    >>> completion.request_id == request_id, completion.steps
    (True, 20)
    """

    def __init__(self, replicas: Sequence[SimulatedReplica], seed: int = 0, report_every_s: float = 2.0) -> None:
        if not replicas:
            raise ValueError("a fleet has at least one replica")
        self.replicas = tuple(replicas)  # idle, and in no other fleet
        self.seed = seed  # of the draws for requests without a script
        parameters = [replica.parameters for replica in replicas]
        max_k = max(each.k for each in parameters)
        schedules = np.zeros((len(replicas), max(len(each.k_by_batch) for each in parameters)), np.int32)
        for row, each in zip(schedules, parameters, strict=True):
            row[: len(each.k_by_batch)] = each.k_by_batch
        self._steps = Arena(np.int16)
        self._blocks = Arena(np.int64)
        self._state = FleetState(
            replicas=_table([replica_record(each) for each in parameters]),
            requests=np.zeros(1024, REQUEST),
            batches=np.zeros((len(replicas), max(each.max_num_seqs for each in parameters)), np.int32),
            schedules=schedules,
            steps=self._steps.data,
            blocks=self._blocks.data,
            nodes=np.zeros(0, NODE),
            index=np.zeros(0, np.int32),
            profiles=np.zeros(0, PROFILE),
            drafted=np.zeros((0, max_k + 1)),
            accepted=np.zeros((0, max_k + 1)),
            progress=np.zeros((0, 2, 1)),
            context=np.zeros((0, max_k + 1, 1)),
            accepted_counts=np.zeros((len(replicas), max_k + 1), np.int64),
            finished=np.zeros(1024, np.int32),
        )
        for number, replica in enumerate(replicas):
            replica.join(self._state.replicas, number)
        self._free = list(range(1023, -1, -1))
        self._has_prefix_cache = [False] * len(replicas)
        self._profile_of: dict[tuple[int, str, float], int] = {}
        self._profiles_of: dict[tuple[bytes, str, float], npt.NDArray[np.int64]] = {}
        self._rows_of: dict[DraftProfile, int] = {}
        self._next_id = 0
        # Seconds between replicas' load reports; the default is a gateway's polling interval.
        self._report_every_s = report_every_s
        self._next_report_s = -math.inf
        self._profile(DraftProfile())  # profile 0: for requests with a script, unless verification is adaptive

    def submit(
        self,
        replica: int,
        prompt_tokens: int,
        output_tokens: int,
        arrived_s: float,
        *,
        kind: str = "chat",
        temperature: float = 0.0,
        prefix_blocks: Sequence[int] = (),
        depth: int = UNCUT,
    ) -> int:
        """Queue a request with unknown text and return its id; its steps are drawn as they run.

        A step drafts as usual but verifies at most `depth` of the draft tokens, as with `deploy/vllm_draft_depth`.
        """
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a request has at least one prompt token and one output token")
        profile = self._profile_for(replica, kind, temperature)
        return self._enqueue(
            replica, prompt_tokens, output_tokens, arrived_s, profile, NONE, prefix_blocks, depth=depth
        )

    def submit_script(
        self,
        replica: int,
        script: Script,
        arrived_s: float,
        *,
        kind: str = "chat",
        temperature: float = 0.0,
        priority: int = 0,
        depth: int = UNCUT,
    ) -> int:
        """Queue a request with a known script and return its id; see `submit`.

        `kind` and `temperature` matter only to adaptive verification, which acts on expected acceptance. A lower
        `priority` is admitted first, as with vLLM's `--scheduling-policy priority`; the newest request is preempted.
        """
        rows = (script.emitted, script.drafted)
        steps_at = self._steps.put(*(np.asarray(row, np.int16) for row in rows))
        self._state = self._state._replace(steps=self._steps.data)
        profile = self._profile_for(replica, kind, temperature) if self.replicas[replica].parameters.adaptive else 0
        try:
            lengths, blocks = (script.prompt_tokens, script.output_tokens), script.prefix_blocks
            return self._enqueue(
                replica, *lengths, arrived_s, profile, steps_at, blocks, depth=depth, priority=priority
            )
        except ValueError:
            self._steps.give_back(steps_at, 2 * script.output_tokens)
            raise

    def advance(self, until_s: float) -> list[Completion]:
        """Begin every step that starts before `until_s`; with infinity, run until all requests have ended.

        Later steps wait for the next call, so that requests that arrive at `until_s` can join them.
        """
        if until_s < self._next_report_s or math.isinf(until_s):
            return self._advance(until_s)
        # Make only the last report: nothing would read those in between.
        last_s = math.floor(until_s / self._report_every_s) * self._report_every_s
        completions = self._advance(last_s)
        for replica in self.replicas:
            replica.report(math.inf)
        self._next_report_s = last_s + self._report_every_s
        return completions + self._advance(until_s)

    def _advance(self, until_s: float) -> list[Completion]:
        state = self._state
        count = kernel.advance(float(until_s), *state)
        if not count:
            return []
        slots: list[int] = state.finished[:count].tolist()
        completions = [self._complete(slot) for slot in slots]
        if count > 1:
            completions.sort(key=lambda completion: completion.ended_s)
        return completions

    def step(self, now_s: float) -> EngineStep | None:
        """Begin the next step of a fleet of one at `now_s`; return None if there is nothing to run.

        The caller keeps the clock, and calls again when the step has ended; only then do requests submitted or
        cancelled meanwhile count. Requests that finish in a step leave the batch when the next one begins.
        """
        if len(self.replicas) > 1:
            raise ValueError("only a fleet of one is stepped")
        state, record = self._state, self._state.replicas[0]
        record["now_s"] = now_s
        sent, drafted = state.requests["sent"].copy(), state.requests["drafted"].copy()
        self._advance(math.nextafter(now_s, math.inf))
        running = int(record["running"])
        if not running:
            return None
        admitted: list[Admission] = []
        if record["admitted"]:
            joined = state.requests[state.batches[0, running - record["admitted"] : running]]
            cached = joined["computed"] - joined["granted"]
            admitted = list(map(Admission, joined["id"].tolist(), cached.tolist()))
        slots = state.batches[0, :running]
        batch = state.requests[slots]
        tokens = batch["sent"] - sent[slots]
        columns = (
            batch["id"],
            tokens,
            batch["drafted"] - drafted[slots],
            batch["sent"],
            batch["output"] - batch["sent"],
        )
        emissions = list(map(Emission._make, np.stack(columns, axis=1)[tokens > 0].tolist()))
        names = ("drafted_k", "batch_tokens", "context_tokens")
        return EngineStep(float(record["step_s"]), emissions, admitted, *(int(record[name]) for name in names))

    def cancel(self, request_id: int) -> None:
        """Drop a request and free its blocks immediately; do nothing if it is unknown or finished."""
        slot = kernel.cancel(self._state, request_id)
        if slot != NONE:
            self._complete(slot)

    def counters(self, replica: int = 0) -> Counters:
        """Return the counters of a replica's engine."""
        record = self._state.replicas[replica]
        reached = self._state.accepted_counts[replica, ::-1].cumsum()[::-1]
        k = max(1, self.replicas[replica].parameters.k)
        accepted_at = np.zeros(k, np.int64)
        accepted_at[: len(reached) - 1] = reached[1 : k + 1]
        return Counters(accepted_at, **{name: int(record[name]) for name in COUNTERS})

    def least_delay(
        self,
        prompt_tokens: int,
        output_tokens: int,
        kind: str,
        temperature: float,
        costs: npt.NDArray[np.float64],
        steps: npt.NDArray[np.int64],
        last_steps: npt.NDArray[np.int64],
    ) -> int:
        """Return the replica on which the next request least delays itself and the requests in flight.

        It shares steps with each request in flight until one of the two ends; each adds seconds to the other's steps.
        """
        rows = self._profiles_for(steps == DRAWN, kind, temperature)
        state = self._state
        chosen: int = choice.least_delay(
            state.replicas, state.requests, state.batches, state.profiles, state.drafted, state.accepted,
            state.progress, state.context, rows, costs, steps, last_steps, self.seed, self._next_id, prompt_tokens,
            output_tokens,
        )  # fmt: skip
        return chosen

    def _enqueue(
        self,
        replica: int,
        prompt_tokens: int,
        output_tokens: int,
        arrived_s: float,
        profile: int,
        steps_at: int,
        prefix_blocks: Sequence[int],
        *,
        depth: int,
        priority: int = 0,
    ) -> int:
        parameters = self.replicas[replica].parameters
        length = prompt_tokens + output_tokens
        if length > parameters.longest_tokens:
            raise ValueError(f"{length} tokens of prompt and output exceed the limit of {parameters.longest_tokens}")
        if -(-(length + parameters.k) // BLOCK_TOKENS) > parameters.kv_blocks:
            raise ValueError(f"{length} tokens do not fit into {parameters.kv_blocks} blocks of KV cache")
        blocks_at = NONE
        if prefix_blocks:
            if not self._has_prefix_cache[replica]:
                self._add_prefix_cache(replica)
            blocks_at = self._blocks.put(np.array(prefix_blocks, np.int64), np.zeros(len(prefix_blocks), np.int64))
            self._state = self._state._replace(blocks=self._blocks.data)
        if not self._free:
            self._add_slots()
        slot = self._free.pop()
        request_id = self._next_id
        self._next_id += 1
        state = self._state
        state.requests[slot] = (
            request_id, arrived_s, 0.0, 0.0, 0, 0.0, steps_at, blocks_at, len(prefix_blocks), 0, 0, replica, profile,
            prompt_tokens, output_tokens, priority, depth, *_UNSTARTED,
        )  # fmt: skip
        kernel.enqueue(state.replicas, state.requests, state.profiles, slot, self.seed)
        self.replicas[replica].in_flight += 1
        return request_id

    def _complete(self, slot: int) -> Completion:
        """Return the completion of a request that has left its replica, and free its slot."""
        (identity, arrived_s, first_s, ended_s, _key, _odds, steps_at, blocks_at, prefix_blocks, _published, _shared,
         replica, _profile, prompt, output, _priority, _depth, _sent, _computed, _held, _granted, _verified, _following,
         _looked_up, cached, steps, drafted, accepted, preemptions) = self._state.requests[slot].item()  # fmt: skip
        if steps_at != NONE:
            self._steps.give_back(steps_at, 2 * output)
        if blocks_at != NONE:
            self._blocks.give_back(blocks_at, 2 * prefix_blocks)
        self._free.append(slot)
        served = self.replicas[replica]
        served.in_flight -= 1
        later_s = served.parameters.outside_s
        return Completion(
            identity, replica, arrived_s, first_s + later_s, ended_s + later_s, prompt, output, cached, steps, drafted,
            accepted, preemptions,
        )  # fmt: skip

    def _add_slots(self) -> None:
        old = self._state.requests
        self._free = list(range(2 * len(old) - 1, len(old) - 1, -1))
        requests = np.concatenate([old, np.zeros_like(old)])
        self._state = self._state._replace(requests=requests, finished=np.zeros(len(requests), np.int32))

    def _profile_for(self, replica: int, kind: str, temperature: float) -> int:
        """Return the row of a replica's draft profile for a kind of text and a temperature."""
        key = (replica, kind, round(temperature, 2))
        row = self._profile_of.get(key)
        if row is None:
            row = self._profile_of[key] = self._profile(self.replicas[replica].profile(kind, key[2]))
        return row

    def _profiles_for(self, drawn: npt.NDArray[np.bool_], kind: str, temperature: float) -> npt.NDArray[np.int64]:
        """Return the row of each replica's draft profile, shape (replicas,); NONE where steps are not drawn."""
        key = (drawn.tobytes(), kind, round(temperature, 2))
        rows = self._profiles_of.get(key)
        if rows is None:
            numbers = enumerate(drawn.tolist())
            rows = np.array([self._profile_for(number, kind, key[2]) if each else NONE for number, each in numbers])
            self._profiles_of[key] = rows
        return rows

    def _profile(self, profile: DraftProfile) -> int:
        """Return the row of a profile, adding it if it is new."""
        row = self._rows_of.get(profile)
        if row is not None:
            return row
        state = self._state
        row = self._rows_of[profile] = len(state.profiles)
        knots, contexts = len(profile.progress[0]), len(profile.context[0])
        entry = np.zeros(1, PROFILE)
        entry["factor"], entry["spread"] = profile.factor, profile.request_spread
        entry["window"] = profile.confidence_window
        entry["always"], entry["knots"], entry["contexts"] = not profile.drafted, knots, contexts
        progress, context = _with_row(state.progress, knots), _with_row(state.context, contexts)
        progress[-1, :, :knots] = profile.progress
        if contexts:
            context[-1, 0, :contexts] = np.log2(profile.context[0])
            context[-1, 1 : len(profile.accepted) + 1, :contexts] = np.transpose(profile.context[1])
        drafted, accepted = np.zeros((2, 1, state.drafted.shape[1]))
        drafted[0, : len(profile.drafted)] = profile.drafted
        accepted[0, : len(profile.accepted)] = profile.accepted
        self._state = state._replace(
            profiles=np.concatenate([state.profiles, entry]),
            drafted=np.concatenate([state.drafted, drafted]),
            accepted=np.concatenate([state.accepted, accepted]),
            progress=progress,
            context=context,
        )
        return row

    def _add_prefix_cache(self, replica: int) -> None:
        """Allocate a replica's prefix cache."""
        state = self._state
        record = state.replicas[replica : replica + 1]
        blocks = int(record["kv_blocks"][0])
        nodes = np.zeros(blocks, NODE)
        nodes["after"] = np.arange(len(state.nodes) + 1, len(state.nodes) + blocks + 1)  # all free, in a list
        nodes["after"][-1] = NONE
        size = 1 << (2 * blocks - 1).bit_length()  # at most half full
        record["free_node"] = len(state.nodes)
        record["index"], record["mask"] = len(state.index), size - 1
        self._state = state._replace(
            nodes=np.concatenate([state.nodes, nodes]),
            index=np.concatenate([state.index, np.full(size, NONE, np.int32)]),
        )
        self._has_prefix_cache[replica] = True


def _with_row(table: npt.NDArray[np.float64], columns: int) -> npt.NDArray[np.float64]:
    """Return a table of shape (profiles, rows, columns) with one more profile, and at least `columns` columns."""
    longer = np.zeros((len(table) + 1, table.shape[1], max(columns, table.shape[2])))
    longer[:-1, :, : table.shape[2]] = table
    return longer


def _table(records: Sequence[Records]) -> Records:
    """Return records as one array whose type is the object `REPLICA`: numba recognizes an equal one more slowly."""
    table = np.empty(len(records), REPLICA)
    for number, record in enumerate(records):
        table[number] = record[0]
    return table


def load_rules(replica: SimulatedReplica) -> None:
    """Load the compiled step rules, so that no step waits for them; the first of several processes compiles them."""
    with Path(kernel.__file__).open("rb") as source:
        fcntl.flock(source, fcntl.LOCK_EX)
        fleet = Fleet([replica])
        fleet.cancel(fleet.submit_script(0, Script(1, 1, *plain_steps(1)), 0.0))
        fleet.step(0.0)
