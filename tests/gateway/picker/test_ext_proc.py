"""The messages of ext_proc, which the conformance suite has too, since it stands alone."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT


@pytest.mark.parametrize("name", ["ext_proc.proto", "ext_proc_pb2.py", "ext_proc_pb2.pyi"])
def test_both_copies_are_alike(name: str) -> None:
    ours, theirs = (ROOT / folder / name for folder in ("gateway/picker", "tests/picker_conformance"))
    assert ours.read_bytes() == theirs.read_bytes()
