"""Requests that two parsers can read differently, each with another one inside."""

from __future__ import annotations

import pytest

from benchmarks.attacks.framing import CASES, Case
from tests.fuzz.targets.requests import WIDE, read


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_request_is_read_from_inside_another(case: Case) -> None:
    request = case.request(b"/v1/chat/completions", b"authorization: Bearer key\r\n")
    assert request.count(b"SMUGGLED") == 1
    assert request.count(b"HTTP/1.") == 2
    assert b"{" not in request.partition(b"\r\n\r\n")[0]
    assert all(b"HTTP/1." in accepted.body for accepted in read([request], WIDE))
