"""Messages between workers survive pickling, also in a compiled gateway."""

from __future__ import annotations

import time
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.service.worker_messages import (
    Drained,
    Launched,
    Reported,
    ResponseStored,
    WorkerDied,
    WorkerMessage,
    WorkerMessages,
)
from gateway.service.workers import send
from tests.support.peer_process import PeerProcess


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


def test_reports_of_workers_reach_the_peers_and_end_with_the_worker() -> None:
    here, there = PeerProcess(time.monotonic), PeerProcess(time.monotonic)
    gateway: Any = SimpleNamespace(peers=here.peers)
    sent: list[WorkerMessage] = []
    sender, receiver = WorkerMessages(1, sent.append), WorkerMessages(0)
    for number in (1, 2):
        there.backends[0].in_flight = number
        there.peers.update()
        sender.share_report(there.peers.report)
        receiver.receive(sent[-1], gateway)
        here.peers.settle(0.12, is_reported=True)
    assert here.load() == [2, 0]
    receiver.receive(WorkerDied(1), gateway)
    here.peers.settle(0.12, is_reported=True)
    assert here.load() == [0, 0]


def test_reports_to_a_process_that_does_not_read_are_left_out() -> None:
    sender, receiver = Pipe()
    for number in range(1000):
        send(sender, Reported(1, b"%04d" % number * 1000))
    received = []
    while receiver.poll():
        received.append(receiver.recv().report[:4])
    assert 1 <= len(received) < 1000
    assert received == [b"%04d" % number for number in range(len(received))]
    send(sender, Reported(1, b"later"))
    assert receiver.recv().report == b"later"
