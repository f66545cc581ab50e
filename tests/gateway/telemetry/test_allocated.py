"""Values of workers survive a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gateway.telemetry.allocated import AllocatedValues

KEYS = [f"gateway_requests_total of a replica with a name of some length, {number}" for number in range(2000)]


def written(file: AllocatedValues, keys: list[str], value: float) -> None:
    for key in keys:
        file.write_value(key, value, 0.0)  # type: ignore[no-untyped-call]


def read(file: AllocatedValues) -> dict[str, float]:
    return {key: value for key, value, _ in file.read_all_values()}  # type: ignore[no-untyped-call]


def test_each_page_of_a_file_has_its_block(tmp_path: Path) -> None:
    """Else a write to it kills the process where the disk is full."""
    path = tmp_path / "counter_1.db"
    file = AllocatedValues(str(path))
    for keys in ([], KEYS):
        written(file, keys, 1.0)
        assert path.stat().st_blocks * 512 >= path.stat().st_size > 0
    file.close()  # type: ignore[no-untyped-call]


def test_a_file_that_somebody_removed_has_its_blocks_too(tmp_path: Path) -> None:
    path = tmp_path / "counter_1.db"
    file = AllocatedValues(str(path))
    path.unlink()
    written(file, KEYS, 1.0)
    status = os.fstat(file._f.fileno())
    assert status.st_blocks * 512 >= status.st_size > 0
    assert not path.exists()
    file.close()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("at_start", [True, False])
def test_a_full_disk_stops_no_counting(
    at_start: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path, open_files = tmp_path / "counter_1.db", {*os.listdir("/proc/self/fd")}
    file = None if at_start else AllocatedValues(str(path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    file = file or AllocatedValues(str(path))
    for value in (1.0, 2.0):
        written(file, KEYS, value)
    assert read(file) == dict.fromkeys(KEYS, 2.0)
    assert path.exists() is not at_start
    file.close()  # type: ignore[no-untyped-call]
    assert open_files >= {*os.listdir("/proc/self/fd")}
    assert f"{path}: No space left on device; /metrics lacks what this worker counts" in caplog.text
