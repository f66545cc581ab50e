"""The records of a fleet: what its compiled step rules read and write of replicas, requests, profiles and the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from backends.calibration.parameters import EngineParameters

Records = npt.NDArray[Any]
"""A structured array, of one of the types below."""

Record = Any
"""One of its entries, which compiled code reads and writes by the names of its fields."""

Floats = npt.NDArray[np.float64]

NONE = -1
"""No request, no node, no script."""

REPLICA = np.dtype(
    [
        # The cost of a step; see `StepTime` and `Drafting`.
        ("base_s", np.float64),
        ("per_token_below_knee_s", np.float64),
        ("per_token_above_knee_s", np.float64),
        ("per_context_token_s", np.float64),
        ("overhead_s", np.float64),
        ("speculation_overhead_s", np.float64),
        ("draft_base_s", np.float64),
        ("draft_per_pass_s", np.float64),
        ("draft_per_request_s", np.float64),
        ("draft_per_context_token_s", np.float64),
        ("draft_verify_share", np.float64),
        ("knee_tokens", np.int64),
        # Limits.
        ("parallel", np.int64),
        ("k", np.int64),
        ("schedule", np.int64),  # entries in its row of schedules; 0: always k
        ("max_num_seqs", np.int64),
        ("max_num_batched_tokens", np.int64),
        ("kv_blocks", np.int64),
        ("prefix_caching", np.int64),
        # Condition.
        ("now_s", np.float64),  # when the step under way ends, or ended
        ("busy_s", np.float64),
        ("running", np.int64),
        ("waiting", np.int64),
        ("first", np.int64),  # of the queue, a slot
        ("last", np.int64),
        ("tokens_in_flight", np.int64),
        ("used", np.int64),  # blocks, as in `BlockPool`
        ("remembered", np.int64),
        # The prefix cache: an index of `mask + 1` entries from `index` on, and lists of nodes.
        ("index", np.int64),
        ("mask", np.int64),
        ("free_node", np.int64),
        ("oldest", np.int64),  # of the remembered ones
        ("newest", np.int64),
        # What it has done; see `Counters`.
        ("steps", np.int64),
        ("prompt_tokens", np.int64),
        ("generation_tokens", np.int64),
        ("finished", np.int64),
        ("preemptions", np.int64),
        ("prefix_queries", np.int64),
        ("prefix_hits", np.int64),
        ("drafts", np.int64),
        ("draft_tokens", np.int64),
        ("accepted_tokens", np.int64),
    ],
    align=True,
)

REQUEST = np.dtype(
    [
        ("id", np.int64),
        ("arrived_s", np.float64),
        ("first_s", np.float64),
        ("ended_s", np.float64),
        ("key", np.uint64),  # of its draws
        ("odds", np.float64),  # what its odds of acceptance are multiplied by
        ("steps_at", np.int64),  # of its script in the arena of steps; NONE: drawn when needed
        ("blocks_at", np.int64),  # of its hashes in the arena of blocks; behind them a flag for each: shared by it
        ("prefix_blocks", np.int32),
        ("published", np.int32),
        ("shared", np.int32),
        ("replica", np.int32),
        ("profile", np.int32),
        ("prompt", np.int32),
        ("output", np.int32),
        ("sent", np.int32),
        ("computed", np.int32),
        ("blocks", np.int32),
        ("granted", np.int32),  # in the step under way
        ("following", np.int32),  # in the queue, a slot
        ("looked_up", np.int32),
        ("cached", np.int32),
        ("steps", np.int32),
        ("drafted", np.int32),
        ("accepted", np.int32),
        ("preemptions", np.int32),
    ],
    align=True,
)

PROFILE = np.dtype(
    [
        ("factor", np.float64),
        ("spread", np.float64),
        ("always", np.int64),  # drafts k in every step
        ("knots", np.int64),  # of its progress
    ],
    align=True,
)

NODE = np.dtype([("hash", np.int64), ("users", np.int32), ("before", np.int32), ("after", np.int32)], align=True)


class State(NamedTuple):
    """The arrays of a fleet.

    Parameters
    ----------
    replicas, requests, profiles, nodes
        Records; requests by slot, nodes those of all replicas one behind the other.
    batches
        Slots of the running requests in the order they were admitted, shape (replicas, largest max_num_seqs).
    schedules
        k by batch size, shape (replicas, largest schedule).
    steps
        Scripts: `emitted` of a request, and behind it `drafted`.
    blocks
        Hashes of a request's blocks, and behind them a 1 for each that it shares.
    index
        Hash tables of nodes, those of all replicas one behind the other.
    drafted, accepted
        Of each profile, see `DraftProfile`; shape (profiles, k + 1).
    progress
        Of each profile, output tokens and shifts; shape (profiles, 2, knots).
    accepted_counts
        Drafts by how many of their tokens were accepted, shape (replicas, k + 1).
    finished
        Room for the slots of requests that end while the fleet advances; one for each slot.
    """

    replicas: Records
    requests: Records
    batches: npt.NDArray[np.int32]
    schedules: npt.NDArray[np.int32]
    steps: npt.NDArray[np.int16]
    blocks: npt.NDArray[np.int64]
    nodes: Records
    index: npt.NDArray[np.int32]  # type: ignore[assignment] # hides the method of tuples, which nobody needs
    profiles: Records
    drafted: Floats
    accepted: Floats
    progress: Floats
    accepted_counts: npt.NDArray[np.int64]
    finished: npt.NDArray[np.int32]


def replica_record(parameters: EngineParameters) -> npt.NDArray[Any]:
    """Return an idle replica, shape (1,)."""
    record = np.zeros(1, REPLICA)
    step, drafting = parameters.step, parameters.drafting
    for name in type(step).model_fields:
        if name != "source":
            record[name] = getattr(step, name)
    for name in ("base_s", "per_pass_s", "per_request_s", "per_context_token_s", "verify_share"):
        record[f"draft_{name}"] = getattr(drafting, name)
    record["parallel"] = drafting.parallel
    for name in ("k", "max_num_seqs", "max_num_batched_tokens", "kv_blocks", "prefix_caching"):
        record[name] = getattr(parameters, name)
    record["schedule"] = len(parameters.k_by_batch)
    for name in ("first", "last", "oldest", "newest", "free_node"):
        record[name] = NONE
    return record
