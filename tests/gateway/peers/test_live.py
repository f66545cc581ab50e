"""The reports of workers in a folder: a file that is none of them, or cannot be read, stops no other."""

from __future__ import annotations

import os
import time
from pathlib import Path

from gateway.peers.exchange import PeerExchange
from gateway.peers.live import LiveFolder
from gateway.telemetry.registry import Registry
from tests.support.peer_process import PeerProcess


def test_strays_in_the_folder_stop_no_report(tmp_path: Path) -> None:
    one, two = LiveFolder(tmp_path, "one"), LiveFolder(tmp_path, "two")
    (tmp_path / "a-folder").mkdir()
    (tmp_path / "a-link").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "a-pipe")
    for number in range(3):
        one.exchange(b"report %d" % number, ())
        assert two.exchange(b"", ()) == [b"report %d" % number]
    one.leave()
    two.exchange(b"", ())
    assert "one" not in two._known, "what has left is forgotten"


async def test_a_report_that_cannot_be_applied_stops_no_other(tmp_path: Path) -> None:
    good, reader = (PeerProcess(time.monotonic) for _ in range(2))
    exchange = PeerExchange(reader.peers, LiveFolder(tmp_path, reader.peers.writer), Registry())
    huge = "9" * 400  # as many requests as no float holds
    for number in range(1, 4):
        use = f"[{huge},{huge},0,0,1,1e300,1e300]"
        report = f'["broken",{number},{{}},{{"team":{use}}},{{}},{{}},{{}},{{}},[],{{}},5]'
        (tmp_path / "broken").write_text(report)
        (tmp_path / "nonsense").write_bytes(b"\xff" * number)
        good.backends[0].in_flight = number
        good.peers.update()
        LiveFolder(tmp_path, good.peers.writer).exchange(good.peers.report, ())
        assert await exchange._exchange()
    reader.peers.settle(is_reported=True)
    assert reader.load() == [3, 0]
