"""Trace files: compressed, truncated, damaged, many, large."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path
from random import Random

import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from lab.trace import BrokenLine, TraceError, TraceRecord, encode, in_arrival_order, read_trace, write_trace
from lab.trace.order import lateness


def some(count: int, begin: int = 0) -> list[TraceRecord]:
    return [
        TraceRecord(id=str(number), arrived_at=float(number), prompt_tokens=5) for number in range(begin, begin + count)
    ]


def lines(records: list[TraceRecord]) -> bytes:
    return b"".join(map(encode, records))


def ids(path: Path) -> tuple[list[str], list[BrokenLine]]:
    broken: list[BrokenLine] = []
    return [one.id for one in read_trace(path, report=broken.append)], broken


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_compression_is_detected_from_the_content(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.jsonl{suffix}"
    write_trace(path, some(1000))
    other = path.rename(tmp_path / "renamed")
    assert ids(other) == ([str(number) for number in range(1000)], [])


def frames(count: int, size: int) -> list[bytes]:
    return [zstandard.compress(lines(some(size, size * number))) for number in range(count)]


def test_every_complete_frame_of_a_truncated_file_is_read(tmp_path: Path) -> None:
    written = frames(4, 50)
    whole = b"".join(written)
    path = tmp_path / "t.jsonl.zst"
    for length in (len(whole) - 1, len(whole) - len(written[3]) // 2, len(whole) - len(written[3]) + 3):
        path.write_bytes(whole[:length])
        assert ids(path)[0] == [str(number) for number in range(150)]


def test_a_truncated_last_line_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(lines(some(3))[:-5])
    found, broken = ids(path)
    assert found == ["0", "1"]
    assert [one.number for one in broken] == [3]


def test_damage_is_reported_and_everything_before_it_is_read(tmp_path: Path) -> None:
    packer = zstandard.ZstdCompressor(write_checksum=True)
    written = [packer.compress(lines(some(500, 500 * number))) for number in range(8)]
    packed = bytearray(b"".join(written))
    packed[sum(map(len, written[:6])) + len(written[6]) // 2] ^= 0xFF
    path = tmp_path / "t"
    path.write_bytes(packed)
    found, broken = ids(path)
    assert found == [str(number) for number in range(len(found))]
    assert 2500 < len(found) <= 3500
    assert "damaged from here on" in broken[-1].why
    with pytest.raises(TraceError, match=r"t:\d+: the file is damaged"):
        list(read_trace(path, strict=True))
    path.write_bytes(gzip.compress(lines(some(3000)))[:-100])
    found, broken = ids(path)
    assert found == [str(number) for number in range(len(found))]
    assert found
    assert "damaged from here on" in broken[-1].why


def test_the_trace_files_of_a_folder_are_read_by_name(tmp_path: Path) -> None:
    write_trace(tmp_path / "b.jsonl.zst", some(2, 2))
    write_trace(tmp_path / "a.jsonl", some(2))
    (tmp_path / "notes.txt").write_text("no trace")
    assert ids(tmp_path)[0] == ["0", "1", "2", "3"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="holds no trace"):
        read_trace(tmp_path / "empty")
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")


@pytest.mark.parametrize(("held", "heap"), [(10, False), (1000, False), (1000, True)])
def test_records_are_sorted_by_arrival_in_memory_and_on_disk(held: int, heap: bool) -> None:
    rng = Random(3)
    records = [TraceRecord(id=str(place), arrived_at=rng.randrange(50), prompt_tokens=5) for place in range(500)]
    records[77] = TraceRecord(id="77", prompt_tokens=5, messages=[{"role": "user", "content": "no time"}])
    late = lateness(-1.0 if one.arrived_at is None else one.arrived_at for one in records) if heap else None
    expected = sorted(records, key=lambda one: -1.0 if one.arrived_at is None else one.arrived_at)
    assert [one.id for one in in_arrival_order(records, late, held)] == [one.id for one in expected]
    assert next(iter(in_arrival_order(records, late, held))).messages == records[77].messages


@given(st.lists(st.integers(0, 30), max_size=60))
def test_lateness_is_the_smallest_buffer_that_sorts(arrivals: list[int]) -> None:
    records = [TraceRecord(id=str(place), arrived_at=arrived_at) for place, arrived_at in enumerate(arrivals)]
    late = lateness(arrivals)
    most = max(
        (sum(one > arrived_at for one in arrivals[:place]) for place, arrived_at in enumerate(arrivals)), default=0
    )
    assert late == most
    ordered = sorted(records, key=lambda one: one.arrived_at or 0)
    assert list(in_arrival_order(records, late)) == ordered
    if late:
        assert list(in_arrival_order(records, late - 1)) != ordered


def test_files_of_several_workers_are_read_in_order(tmp_path: Path) -> None:
    records = some(600)
    write_trace(tmp_path / "a.jsonl", [*records[100:300], *records[:100], *records[400:500]])
    write_trace(tmp_path / "b.jsonl.zst", [*records[300:400], *records[500:]])
    assert list(read_trace(tmp_path, in_order=True)) == records


_MEMORY = """
import resource, sys
from pathlib import Path
from lab.trace import read_trace
limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(1 for _ in read_trace(Path(sys.argv[1])))
print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - limit) / 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lines", "list"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    text = "word " * 2000
    path = tmp_path / "large"
    with path.open("wb") as file:
        if kind == "lines":
            for number in range(15_000):
                file.write(orjson.dumps({"prompt_tokens": 1, "arrived_at": number, "prompt": text}) + b"\n")
        else:
            turns = [{"from": "human", "value": text}, {"from": "gpt", "value": "yes"}]
            for number in range(15_000):
                file.write((b"," if number else b"[") + orjson.dumps({"id": number, "conversations": turns}))
            file.write(b"]")
    result = subprocess.run([sys.executable, "-c", _MEMORY, str(path)], capture_output=True, check=True, text=True)
    count, grown_mib = result.stdout.split()
    assert int(count) == 15_000
    assert path.stat().st_size > 140 * 2**20
    assert float(grown_mib) < 130  # mostly DuckDB itself


def test_a_file_truncated_anywhere_is_read_up_to_its_last_complete_frame(tmp_path: Path) -> None:
    records = [TraceRecord(id=str(number), arrived_at=float(number), prompt_tokens=5) for number in range(9)]
    frames = [
        zstandard.ZstdCompressor(write_checksum=True).compress(b"".join(map(encode, records[start : start + 3])))
        for start in (0, 3, 6)
    ]
    whole = b"".join(frames)
    ends = {sum(map(len, frames[: count + 1])): 3 * (count + 1) for count in range(3)}
    path = tmp_path / "requests.jsonl.zst"
    for length in range(5, len(whole) + 1):
        path.write_bytes(whole[:length])
        broken: list[BrokenLine] = []
        read = list(read_trace(path, report=broken.append))
        assert read == records[: len(read)]
        assert len(read) >= max((count for end, count in ends.items() if end <= length), default=0)
        if length in ends:
            assert (len(read), broken) == (ends[length], [])
        else:
            assert [str(one) for one in broken] == [
                f"{path}:{len(read) + 1}: the file is damaged from here on: it was cut off within a zstd frame"
            ]
