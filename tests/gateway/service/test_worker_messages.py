"""Messages between workers survive pickling, also in a compiled gateway."""

from __future__ import annotations

from multiprocessing import Pipe

import pytest

from gateway.service.worker_messages import Drained, Launched, Reported, ResponseStored, WorkerDied, WorkerMessage


@pytest.mark.parametrize(
    "message",
    [
        Drained("m", "a", drained=True),
        Reported(1, b"a report"),
        Launched({"m/a": {"pid": 7, "restarts": 0}}),
        WorkerDied(2),
        ResponseStored("resp_1", "a"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_pass_through_a_pipe(message: WorkerMessage) -> None:
    sender, receiver = Pipe()
    sender.send(message)
    assert receiver.recv() == message
