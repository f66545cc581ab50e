"""Each part of the learner can be left out, and some of them are missed at once."""

from __future__ import annotations

from random import Random

import pytest

from backends.drafter_limit import DrafterLimit
from backends.speculation import Method
from benchmarks.routing.ablation.parts import PARTS, without
from lab.simulation.replica_spec import ReplicaSpec
from lab.simulation.request import ReplayRequest, replay_request
from lab.simulation.simulate import Replayed, replay
from lab.trace.record import TraceRecord

LIKE = "llama-3.1-8b-h100"
BY_BATCH = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 1024, 0]]}
POOL = [
    ReplicaSpec("plain", Method.BASELINE, {}, LIKE),
    ReplicaSpec("tree", Method.SUFFIX, {"num_speculative_tokens": 16}, LIKE, kv_blocks=600),
    ReplicaSpec("deep", Method.EAGLE3, BY_BATCH, LIKE),
    ReplicaSpec("short", Method.EAGLE3, {"num_speculative_tokens": 3}, LIKE, drafter_limit=DrafterLimit(2048)),
]


@pytest.fixture(scope="module")
def requests() -> list[ReplayRequest]:
    rng, found, at_s = Random(0), [], 0.0
    for number in range(400):
        at_s += rng.expovariate(12.0)
        record = TraceRecord(
            workload=rng.choice(["chat", "code"]),
            temperature=rng.choice([0.0, 0.7]),
            template=f"t{number % 5}",
            prompt_tokens=rng.choice([100, 600, 3000]),
            output_tokens=rng.randint(20, 300),
            prefix_blocks=[number % 7, 7 + number % 31],
            block_tokens=64,
        )
        found.append(replay_request(record, at_s, 0.0))
    return found


def _played(requests: list[ReplayRequest], *parts: str) -> Replayed:
    return replay(POOL, requests, without(0, *parts))


@pytest.fixture(scope="module")
def whole(requests: list[ReplayRequest]) -> Replayed:
    return _played(requests)


@pytest.mark.parametrize("part", PARTS)
def test_each_part_can_be_left_out(requests: list[ReplayRequest], part: str) -> None:
    played = _played(requests, part)
    assert (played.errors, len(played.e2e_s)) == (0, len(requests))


@pytest.mark.parametrize(
    "part", ["delay of others", "prefix memory", "k by batch size", "drafters' limits", "table of lengths"]
)
def test_a_part_that_is_left_out_changes_choices(requests: list[ReplayRequest], whole: Replayed, part: str) -> None:
    assert _played(requests, part).backend.tolist() != whole.backend.tolist()


def test_what_is_left_out_must_be_there() -> None:
    policy = without(0)
    del policy.sum._others
    with pytest.raises(AttributeError):
        PARTS["delay of others"].change(policy)
