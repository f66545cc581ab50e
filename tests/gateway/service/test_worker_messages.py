"""What workers tell each other must come through a pipe, from a compiled gateway too."""

from __future__ import annotations

from multiprocessing import Pipe

import pytest

from gateway.relay.limits import KeyUse
from gateway.service.worker_messages import Drained, KeysUsed, Launched, ResponseStored, WorkerDied, WorkerMessage


@pytest.mark.parametrize(
    "note",
    [
        Drained("m", "a", drained=True),
        KeysUsed(1, {"team": KeyUse(3, 2048, 1)}),
        Launched({"m/a": {"pid": 7, "restarts": 0}}),
        WorkerDied(2),
        ResponseStored("resp_1", "a"),
    ],
    ids=lambda note: type(note).__name__,
)
def test_it_arrives_as_it_was_sent(note: WorkerMessage) -> None:
    ours, theirs = Pipe()
    ours.send(note)
    assert theirs.recv() == note
