"""A fleet's records, which its compiled step rules read and write: replicas, requests, profiles, prefix cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from backends.calibration.calibration import StepTime
from backends.calibration.parameters import EngineParameters
from backends.drafter_limit import Beyond
from backends.simulator.engine.step import Counters

Records = npt.NDArray[Any]
"""A structured array with one of the types below."""

Record = Any
"""An entry of a structured array; compiled code reads and writes its fields by name."""

Floats = npt.NDArray[np.float64]

NONE = -1
"""No request, node or script."""

DRAWN, EXCLUDED = -1, 0
"""Instead of a number of steps: the fleet draws them, or the replica cannot be chosen."""

_STEP = [name for name in StepTime.model_fields if name != "source"]
_DRAFTING = ("base_s", "per_pass_s", "per_request_s", "per_context_token_s", "verify_share", "adaptive_s")
_LIMITS = ["k", "max_num_seqs", "max_num_batched_tokens", "kv_blocks", "prefix_caching", "least_passes", "adaptive"]
_LIMITS += ["reserves_sequence", "asynchronous"]
COUNTERS = [name for name in Counters.__dataclass_fields__ if name != "accepted_at"]

REPLICA = np.dtype(
    [
        # The cost of a step.
        *((name, np.int64 if StepTime.model_fields[name].annotation is int else np.float64) for name in _STEP),
        *((f"draft_{name}", np.float64) for name in _DRAFTING),
        ("draft_more_passes", np.float64),  # passes by which the first takes longer than the others
        ("parallel", np.int64),
        # Limits.
        *((name, np.int64) for name in _LIMITS),
        ("schedule", np.int64),  # length of its row in `schedules`; 0: always k
        ("profiled_context", np.int64),  # of the dummy request on which the engine measures its steps at start
        ("drafter_tokens", np.int64),  # the longest context that the drafter serves; 0: any
        ("beyond_batch", np.int64),  # whether one request beyond it turns its batch's drafts into dummies
        ("beyond_none", np.int64),  # whether it alone gets no drafts
        # State.
        ("now_s", np.float64),  # end of the current or last step
        ("began_s", np.float64),  # start of the current or last step
        ("running", np.int64),
        ("waiting", np.int64),
        ("first", np.int64),  # slot at the head of the queue
        ("last", np.int64),  # slot at its tail
        ("used", np.int64),  # blocks held by requests
        ("remembered", np.int64),  # blocks without users that hold a reusable prefix
        # The prefix cache: a hash table of `mask + 1` entries from `index` on, and linked lists of nodes.
        ("index", np.int64),
        ("mask", np.int64),
        ("free_node", np.int64),
        ("oldest", np.int64),  # node of a remembered block
        ("newest", np.int64),
        # The current or last step.
        ("step_s", np.float64),
        ("drafted_k", np.int64),  # tokens drafted per request, to be verified in the next step
        ("dummies", np.int64),  # whether these are dummies, which are never accepted
        ("batch_tokens", np.int64),
        ("context_tokens", np.int64),
        ("admitted", np.int64),  # requests that joined the batch: its last ones
        *((name, np.int64) for name in COUNTERS),
    ],
    align=True,
)

UNCUT = 2**31 - 1
"""Depth of a request whose drafts are not cut."""

REQUEST = np.dtype(
    [
        ("id", np.int64),
        ("arrived_s", np.float64),
        ("first_s", np.float64),
        ("ended_s", np.float64),
        ("key", np.uint64),  # of its stream of draws
        ("odds", np.float64),  # factor on the odds of acceptance
        ("steps_at", np.int64),  # start of its script in the arena of steps; NONE: drawn when needed
        ("blocks_at", np.int64),  # start of its hashes in the arena of blocks, followed by a flag each: shared
        ("prefix_blocks", np.int32),
        ("published", np.int32),
        ("shared", np.int32),
        ("replica", np.int32),
        ("profile", np.int32),
        ("prompt", np.int32),
        ("output", np.int32),
        ("priority", np.int32),  # lower ones are admitted first
        ("depth", np.int32),  # most of its draft tokens verified in a step
        ("sent", np.int32),
        ("computed", np.int32),
        ("blocks", np.int32),
        ("granted", np.int32),  # tokens in the current step
        ("verified", np.int32),  # the draft tokens among them that adaptive verification keeps
        ("following", np.int32),  # next slot in the queue
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
        ("window", np.float64),  # `DraftProfile.confidence_window`
        ("always", np.int64),  # whether every step drafts k tokens
        ("knots", np.int64),  # entries in its row of `progress`
        ("contexts", np.int64),  # entries in its rows of `context`
    ],
    align=True,
)

NODE = np.dtype([("hash", np.int64), ("users", np.int32), ("before", np.int32), ("after", np.int32)], align=True)


class FleetState(NamedTuple):
    """The arrays of a fleet."""

    # replicas, requests, profiles, nodes: records; requests by slot, nodes of all replicas concatenated.
    replicas: Records
    requests: Records
    # Slots of running requests in order of admission, shape (replicas, largest max_num_seqs).
    batches: npt.NDArray[np.int32]
    schedules: npt.NDArray[np.int32]  # k by batch size, shape (replicas, largest schedule)
    steps: npt.NDArray[np.int16]  # scripts: a request's `emitted`, followed by its `drafted`
    blocks: npt.NDArray[np.int64]  # hashes of a request's blocks, followed by a flag each: 1 if shared
    nodes: Records
    # Hash tables of nodes, all replicas concatenated.
    index: npt.NDArray[np.int32]  # type: ignore[assignment] # hides the method of tuples, which is unused
    profiles: Records
    # drafted, accepted: fields of `DraftProfile` for each profile, shape (profiles, k + 1).
    drafted: Floats
    accepted: Floats
    progress: Floats  # output positions and logit shifts of each profile, shape (profiles, 2, knots)
    # log2 of contexts, then the shifts of draft positions 1 to k there, shape (profiles, k + 1, contexts).
    context: Floats
    accepted_counts: npt.NDArray[np.int64]  # drafts by number of accepted tokens, shape (replicas, k + 1)
    finished: npt.NDArray[np.int32]  # output of an advance: slots of the requests that ended; as long as `requests`


def replica_record(parameters: EngineParameters) -> npt.NDArray[Any]:
    """Return the record of an idle replica, shape (1,)."""
    record = np.zeros(1, REPLICA)
    step, drafting = parameters.step, parameters.drafting
    for prefix, source, names in (("", step, _STEP), ("draft_", drafting, _DRAFTING), ("", parameters, _LIMITS)):
        for name in names:
            record[prefix + name] = getattr(source, name)
    record["draft_more_passes"], record["parallel"] = drafting.first_passes - 1, drafting.parallel
    if limit := parameters.drafter_limit:
        record["drafter_tokens"] = limit.tokens
        record["beyond_batch"], record["beyond_none"] = limit.beyond is Beyond.BATCH, limit.beyond is Beyond.NONE
    record["drafted_k"] = parameters.k
    record["profiled_context"] = min(parameters.profile_context, parameters.max_model_len)
    record["schedule"] = len(parameters.k_by_batch)
    for name in ("first", "last", "oldest", "newest", "free_node"):
        record[name] = NONE
    return record
