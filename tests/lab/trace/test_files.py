"""Trace files: cut short, damaged, many, large."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import orjson
import pytest
import zstandard

from lab.trace.decode import encode
from lab.trace.lines import BrokenLine, TraceError
from lab.trace.read import in_arrival_order, read_trace
from lab.trace.record import TraceRecord
from lab.trace.write import write_trace


def some(count: int, begin: int = 0) -> list[TraceRecord]:
    return [
        TraceRecord(id=str(number), arrived_at=float(number), prompt_tokens=5) for number in range(begin, begin + count)
    ]


@pytest.mark.slow
def test_a_recording_cut_short_anywhere_is_read_up_to_its_last_complete_frame(tmp_path: Path) -> None:
    records = some(9)
    packer = zstandard.ZstdCompressor(write_checksum=True)
    frames = [packer.compress(b"".join(map(encode, records[start : start + 3]))) for start in (0, 3, 6)]
    ends = {sum(map(len, frames[: count + 1])): 3 * (count + 1) for count in range(3)}
    path = tmp_path / "requests.jsonl.zst"
    for length in range(5, sum(map(len, frames)) + 1):
        path.write_bytes(b"".join(frames)[:length])
        broken: list[BrokenLine] = []
        found = list(read_trace(path, report=broken.append))
        assert found == records[: len(found)]
        assert len(found) >= max((count for end, count in ends.items() if end <= length), default=0)
        if length in ends:
            assert (len(found), broken) == (ends[length], [])
        else:
            assert [str(one) for one in broken] == [
                f"{path}:{len(found) + 1}: the file is damaged from here on: it was cut off within a zstd frame"
            ]


def test_the_trace_files_of_a_folder_are_read_by_name(tmp_path: Path) -> None:
    write_trace(tmp_path / "b.jsonl.zst", some(2, 2))
    write_trace(tmp_path / "a.jsonl", some(2))
    (tmp_path / "notes.txt").write_text("no trace")
    assert list(read_trace(tmp_path)) == some(4)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="holds no trace"):
        read_trace(tmp_path / "empty")
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")


@pytest.mark.parametrize("held", [10, 1000])
def test_records_are_sorted_by_arrival_in_memory_and_on_disk(held: int) -> None:
    rng = Random(3)
    records = [TraceRecord(id=str(place), arrived_at=rng.randrange(50), prompt_tokens=5) for place in range(500)]
    records[77] = TraceRecord(id="77", prompt_tokens=5, messages=[{"role": "user", "content": "no time"}])
    expected = sorted(records, key=lambda one: -1.0 if one.arrived_at is None else one.arrived_at)
    assert list(in_arrival_order(records, held)) == expected


def test_a_file_is_replaced_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("before")

    def records() -> Iterator[TraceRecord]:
        yield TraceRecord()
        raise KeyError

    with pytest.raises(KeyError):
        write_trace(path, records())
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TraceError, match="cannot write the file"):
        write_trace(tmp_path / "no" / "x", [TraceRecord()])


_MEMORY = """
import resource, sys
from pathlib import Path
from lab.trace.read import read_trace
limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(1 for _ in read_trace(Path(sys.argv[1])))
print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - limit) / 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "records"), [("lines", 15_000), ("list", 15_000), ("packed", 1)])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str, records: int) -> None:
    text = "word " * 2000
    path = tmp_path / "large"
    with path.open("wb") as file:
        if kind == "packed":
            file.write(zstandard.compress(encode(TraceRecord(prompt_tokens=1)) + bytes(512 << 20), 19))
        elif kind == "lines":
            for number in range(15_000):
                file.write(orjson.dumps({"prompt_tokens": 1, "arrived_at": number, "prompt": text}) + b"\n")
        else:
            turns = [{"from": "human", "value": text}, {"from": "gpt", "value": "yes"}]
            for number in range(15_000):
                file.write((b"," if number else b"[") + orjson.dumps({"id": number, "conversations": turns}))
            file.write(b"]")
    result = subprocess.run([sys.executable, "-c", _MEMORY, str(path)], capture_output=True, check=True, text=True)
    count, grown_mib = result.stdout.split()
    assert int(count) == records
    assert (path.stat().st_size > 140 * 2**20) is (kind != "packed")
    assert float(grown_mib) < 130  # mostly DuckDB itself
