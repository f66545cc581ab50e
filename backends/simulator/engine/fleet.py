"""Many engines in virtual time, for traces of a million requests: the rules of `Engine`, compiled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from backends.calibration.draft_profile import DraftProfile
from backends.drafting.script import BLOCK_TOKENS, Script
from backends.simulator.engine import kernel
from backends.simulator.engine.arena import Arena
from backends.simulator.engine.replica import Completion, Replica
from backends.simulator.engine.state import NODE, NONE, PROFILE, REQUEST, State, replica_record
from backends.simulator.engine.step import Counters

__all__ = ["Completion", "Fleet", "Replica"]

_UNSTARTED = (0,) * (len(REQUEST.names or ()) - 15)


class Fleet:
    """Engines that advance together in virtual time.

    The draws of a request depend on `seed` and its id alone, not on its replica or on what else goes on: with the same
    requests in the same order, two policies are compared on the same luck.

    Parameters
    ----------
    replicas
        Idle; they belong to this fleet from now on.
    seed
        Of the draws for requests without a script.
    report_every_s
        How often replicas report their load; the default is how often a gateway asks for it.
    """

    def __init__(self, replicas: Sequence[Replica], seed: int = 0, report_every_s: float = 2.0) -> None:
        if not replicas:
            raise ValueError("a fleet has at least one replica")
        self.replicas = tuple(replicas)
        self.seed = seed
        parameters = [replica.parameters for replica in replicas]
        most_k = max(each.k for each in parameters)
        schedules = np.zeros((len(replicas), max(len(each.k_by_batch) for each in parameters)), np.int32)
        for row, each in zip(schedules, parameters, strict=True):
            row[: len(each.k_by_batch)] = each.k_by_batch
        self._steps = Arena(np.int16)
        self._blocks = Arena(np.int64)
        self._state = State(
            replicas=np.concatenate([replica_record(each) for each in parameters]),
            requests=np.zeros(1024, REQUEST),
            batches=np.zeros((len(replicas), max(each.max_num_seqs for each in parameters)), np.int32),
            schedules=schedules,
            steps=self._steps.data,
            blocks=self._blocks.data,
            nodes=np.zeros(0, NODE),
            index=np.zeros(0, np.int32),
            profiles=np.zeros(0, PROFILE),
            drafted=np.zeros((0, most_k + 1)),
            accepted=np.zeros((0, most_k + 1)),
            progress=np.zeros((0, 2, 1)),
            accepted_counts=np.zeros((len(replicas), most_k + 1), np.int64),
            finished=np.zeros(1024, np.int32),
        )
        for number, replica in enumerate(replicas):
            replica.join(self._state.replicas, number)
        self._free = list(range(1023, -1, -1))
        self._remembers = [False] * len(replicas)
        self._profile_of: dict[tuple[int, str, float], int] = {}
        self._rows_of: dict[DraftProfile, int] = {}
        self._next_id = 0
        self._report_every_s = report_every_s
        self._next_report_s = -math.inf
        self._profile(DraftProfile())  # that of requests with a script: never asked

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
    ) -> int:
        """Queue a request of which no text is known, and return its id; its steps are drawn as they are taken.

        Parameters
        ----------
        replica
            Position in the fleet.
        arrived_s
            Not before the time to which the fleet has advanced.
        kind, temperature
            What its acceptance depends on; temperatures are taken to two decimals.
        prefix_blocks
            As in `Script`; none mean that the request shares nothing with others.

        Raises
        ------
        ValueError
            If it is longer than `max_model_len`, could never fit into the KV cache, or has no tokens.
        """
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a request has at least one prompt token and one output token")
        profile = self._profile_for(replica, kind, temperature)
        return self._enqueue(replica, prompt_tokens, output_tokens, arrived_s, profile, NONE, prefix_blocks)

    def submit_script(self, replica: int, script: Script, arrived_s: float) -> int:
        """Queue a request whose steps are known, and return its id; otherwise as `submit`."""
        rows = (script.emitted, script.drafted)
        steps_at = self._steps.put(*(np.asarray(row, np.int16) for row in rows))
        self._state = self._state._replace(steps=self._steps.data)
        try:
            return self._enqueue(
                replica, script.prompt_tokens, script.output_tokens, arrived_s, 0, steps_at, script.prefix_blocks
            )
        except ValueError:
            self._steps.give_back(steps_at, 2 * script.output_tokens)
            raise

    def advance(self, until_s: float) -> list[Completion]:
        """Begin every step that begins before `until_s`; infinity plays until all is done.

        A step that begins later is left for the next call, so that requests that arrive at `until_s` can join it.

        Returns
        -------
        list of Completion
            The requests whose last step ended before `until_s`, in order of their ends.
        """
        if until_s < self._next_report_s or math.isinf(until_s):
            return self._advance(until_s)
        # The reports in between that nobody sees are left out.
        last_s = math.floor(until_s / self._report_every_s) * self._report_every_s
        completions = self._advance(last_s)
        for replica in self.replicas:
            replica.report(last_s)
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

    def counters(self, replica: int) -> Counters:
        """Return what an engine has done since it began."""
        record = self._state.replicas[replica]
        reached = self._state.accepted_counts[replica, ::-1].cumsum()[::-1]
        names = [name for name in Counters.__dataclass_fields__ if name != "accepted_at"]
        k = max(1, self.replicas[replica].parameters.k)
        accepted_at = np.zeros(k, np.int64)
        accepted_at[: len(reached) - 1] = reached[1 : k + 1]
        return Counters(accepted_at, **{name: int(record[name]) for name in names})

    def script(self, request_id: int, replica: int, output_tokens: int, kind: str, temperature: float) -> Script:
        """Write down the steps that a request without a text draws, all of them; its prompt is one token."""
        profile = self._profile_for(replica, kind, temperature)
        emitted, drafted = np.zeros(output_tokens, np.int32), np.zeros(output_tokens, np.int32)
        k = self.replicas[replica].parameters.k
        kernel.draw_script(self._state, self.seed, request_id, profile, k, emitted, drafted)
        return Script(1, output_tokens, emitted, drafted)

    def next_steps(self, replica: int, output_tokens: int, kind: str, temperature: float) -> int:
        """Return how many steps the next request would take on a replica if it were queued there without a script."""
        profile = self._profile_for(replica, kind, temperature)
        state, k = self._state, self.replicas[replica].parameters.k
        steps: int = kernel.count_drawn(
            state.profiles, state.drafted, state.accepted, state.progress, self.seed, self._next_id, profile, k,
            output_tokens,
        )  # fmt: skip
        return steps

    def _enqueue(
        self,
        replica: int,
        prompt_tokens: int,
        output_tokens: int,
        arrived_s: float,
        profile: int,
        steps_at: int,
        prefix_blocks: Sequence[int],
    ) -> int:
        parameters = self.replicas[replica].parameters
        length = prompt_tokens + output_tokens
        if length > parameters.max_model_len:
            raise ValueError(f"{length} tokens of prompt and output exceed max_model_len {parameters.max_model_len}")
        if -(-(length + parameters.k) // BLOCK_TOKENS) > parameters.kv_blocks:
            raise ValueError(f"{length} tokens do not fit into {parameters.kv_blocks} blocks of KV cache")
        blocks_at = NONE
        if prefix_blocks:
            if not self._remembers[replica]:
                self._remember_prefixes(replica)
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
            prompt_tokens, output_tokens, *_UNSTARTED,
        )  # fmt: skip
        kernel.enqueue(state.replicas, state.requests, state.profiles, slot, self.seed)
        self.replicas[replica].in_flight += 1
        return request_id

    def _complete(self, slot: int) -> Completion:
        """Make a completion of a finished request, and free its slot."""
        (identity, arrived_s, first_s, ended_s, _key, _odds, steps_at, blocks_at, prefix_blocks, _published, _shared,
         replica, _profile, prompt, output, _sent, _computed, _held, _granted, _following, _looked_up, cached, steps,
         drafted, accepted, preemptions) = self._state.requests[slot].item()  # fmt: skip
        if steps_at != NONE:
            self._steps.give_back(steps_at, 2 * output)
        if blocks_at != NONE:
            self._blocks.give_back(blocks_at, 2 * prefix_blocks)
        self._free.append(slot)
        self.replicas[replica].in_flight -= 1
        return Completion(
            identity,
            replica,
            arrived_s,
            first_s,
            ended_s,
            prompt,
            output,
            cached,
            steps,
            drafted,
            accepted,
            preemptions,
        )

    def _add_slots(self) -> None:
        old = self._state.requests
        self._free = list(range(2 * len(old) - 1, len(old) - 1, -1))
        requests = np.concatenate([old, np.zeros_like(old)])
        self._state = self._state._replace(requests=requests, finished=np.zeros(len(requests), np.int32))

    def _profile_for(self, replica: int, kind: str, temperature: float) -> int:
        """Return the row of the profile by which a replica drafts for such a request."""
        known = (replica, kind, round(temperature, 2))
        row = self._profile_of.get(known)
        if row is None:
            row = self._profile_of[known] = self._profile(self.replicas[replica].profile(kind, known[2]))
        return row

    def _profile(self, profile: DraftProfile) -> int:
        """Return the row of a profile, a new one if it has none."""
        known = self._rows_of.get(profile)
        if known is not None:
            return known
        state = self._state
        number = self._rows_of[profile] = len(state.profiles)
        knots = len(profile.progress[0])
        entry = np.zeros(1, PROFILE)
        entry["factor"], entry["spread"] = profile.factor, profile.request_spread
        entry["always"], entry["knots"] = not profile.drafted, knots
        progress = np.zeros((number + 1, 2, max(knots, state.progress.shape[2])))
        progress[:-1, :, : state.progress.shape[2]] = state.progress
        progress[-1, :, :knots] = profile.progress
        drafted, accepted = np.zeros((2, 1, state.drafted.shape[1]))
        drafted[0, : len(profile.drafted)] = profile.drafted
        accepted[0, : len(profile.accepted)] = profile.accepted
        self._state = state._replace(
            profiles=np.concatenate([state.profiles, entry]),
            drafted=np.concatenate([state.drafted, drafted]),
            accepted=np.concatenate([state.accepted, accepted]),
            progress=progress,
        )
        return number

    def _remember_prefixes(self, replica: int) -> None:
        """Give a replica its prefix cache."""
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
        self._remembers[replica] = True
