"""Messages between workers survive pickling, also in a compiled gateway, and nobody waits for who does not read."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.reload.messages import FailureCounted
from gateway.service.worker_messages import (
    Channel,
    Drained,
    Launched,
    Reported,
    ResponseStored,
    WorkerDied,
    WorkerMessage,
    WorkerMessages,
)
from gateway.service.worker_reload import WorkerReload
from gateway.telemetry.metrics import Metrics
from tests.support.peer_process import PeerProcess
from tests.support.waiting import eventually


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
async def test_messages_pass_through_a_channel(message: WorkerMessage) -> None:
    async with channels() as (here, there):
        here.channel.send(message)
        await eventually(lambda: there.received == [message])


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


class End:
    """One end of a channel, with what has arrived there."""

    def __init__(self, opened: socket.socket) -> None:
        self.received: list[Any] = []
        self.has_ended = False
        self.channel = Channel(opened, self.received.append, self._end)

    def _end(self) -> None:
        self.has_ended = True

    def numbers(self) -> list[int]:
        return [int(each.response_id) for each in self.received if isinstance(each, ResponseStored)]


@contextlib.asynccontextmanager
async def channels() -> AsyncIterator[tuple[End, End]]:
    ends = [End(opened) for opened in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.channel.close()


async def test_nobody_waits_for_a_process_that_does_not_read() -> None:
    async with channels() as (here, there):
        needed = [Drained("m", str(number), drained=True) for number in range(5000)]
        for end in (here, there):  # nobody reads before the test does: both directions are full
            for number, each in enumerate(needed):
                end.channel.send(ResponseStored(f"{number:05}", "a" * 400))
                end.channel.send(each)
            assert end.channel.dropped > 0
        await eventually(lambda: here.numbers()[-1:] == there.numbers()[-1:] == [4999])
        for end in (here, there):
            assert [each for each in end.received if isinstance(each, Drained)] == needed, "what others need arrives"
            assert end.numbers() == sorted(end.numbers())
            assert end.numbers()[-1000:] == list(range(4000, 5000)), "the oldest are dropped"
        assert len(there.numbers()) + here.channel.dropped == 5000


async def test_messages_of_any_size_arrive() -> None:
    async with channels() as (here, there):
        sent = [Reported(number, bytes(10**number)) for number in range(7)] + [Drained("m", "x" * 10**6, drained=True)]
        for number, message in enumerate(sent):
            here.channel.send(message)
            await eventually(lambda count=number: len(there.received) > count)
        assert there.received == sent


async def test_the_end_of_the_other_process_is_noticed_and_sending_to_it_costs_nothing() -> None:
    async with channels() as (here, there):
        there.channel.close()
        here.channel.send(WorkerDied(1))
        await eventually(lambda: here.has_ended)
        for _ in range(3):
            here.channel.send(WorkerDied(1))
        assert here.channel.dropped == 0


async def test_a_message_that_cannot_be_handled_is_not_the_last() -> None:
    async with channels() as (here, there):
        handled = there.channel._on_message
        there.channel._on_message = lambda message: 1 // message.worker or handled(message)
        for number in (0, 2):
            here.channel.send(WorkerDied(number))
        await eventually(lambda: there.received == [WorkerDied(2)])


def test_a_worker_counts_what_fails_in_the_main_process() -> None:
    gateway: Any = SimpleNamespace(metrics=Metrics(), reload=None)
    WorkerReload(0, gateway, lambda message: None).receive(FailureCounted("reloads"))
    gateway.metrics.flush()
    counted = gateway.metrics.registry.get_sample_value("gateway_background_failures_total", {"work": "reloads"})
    assert counted == 1.0
