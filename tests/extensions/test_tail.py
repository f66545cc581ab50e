"""`policies/features/_tail.c` gives exactly the results of the Python implementation."""

from __future__ import annotations

import re
from itertools import product
from random import Random
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.features.tail import _CODE_LINE, WINDOW_BYTES, share_by_expression, share_by_sorting

pytestmark = pytest.mark.slow

WORDS = ["def", *re.findall(r"[a-zA-Z]+", _CODE_LINE.pattern.partition("(?:def")[2].partition(")")[0])]
SIGNS = [
    *"\n\t -*+\u2022\u06631.)]}#/@_!x\u00e9\u6f22\U0001f600\u00b2\0\r",
    ">>> ",
    ">>>",
    "/*",
    "#include",
    "#define",
    "12",
]
LINES = st.lists(st.sampled_from(WORDS + SIGNS) | st.text(max_size=2), max_size=25).map("".join)


@given(LINES)
def test_the_share_of_code_equals_that_by_regular_expression(tail: ModuleType, text: str) -> None:
    assert tail.code_share(text) == share_by_expression(text)


def test_the_share_of_code_is_equal_for_every_start_of_a_line(tail: ModuleType) -> None:
    for indent in ("", " ", "  ", "   ", "\t", " \t", "\t "):
        for first, second in product(SIGNS + WORDS, [*SIGNS, "", "\nx"]):
            text = indent + first + second
            assert tail.code_share(text) == share_by_expression(text), text


@pytest.mark.slow
@pytest.mark.parametrize(("unit_bytes", "run_bytes"), [(1, 16), (4, 12), (1, 8), (3, 9)])
@given(
    st.binary(max_size=64)
    | st.lists(st.sampled_from([b"a", b"\0", b"the cat ", b"\xff" * 9]), max_size=60).map(b"".join)
)
def test_the_share_of_repeated_runs_equals_that_by_sorting(
    tail: ModuleType, unit_bytes: int, run_bytes: int, raw: bytes
) -> None:
    assert tail.repeated_share(raw, unit_bytes, run_bytes) == share_by_sorting(raw, unit_bytes, run_bytes)


def test_the_share_of_repeated_runs_is_equal_for_full_windows(tail: ModuleType) -> None:
    draw = Random(1)
    for signs in (b"\0", b"ab", bytes(range(256)), b"abcdefgh"):
        for _ in range(20):
            raw = bytes(draw.choices(signs, k=draw.randrange(WINDOW_BYTES))) + draw.randbytes(300)
            raw = (raw + raw)[-WINDOW_BYTES:]
            for unit_bytes, run_bytes in ((1, 16), (4, 12)):
                assert tail.repeated_share(raw, unit_bytes, run_bytes) == share_by_sorting(raw, unit_bytes, run_bytes)


def test_invalid_arguments_are_refused(tail: ModuleType) -> None:
    for wrong in ((b"",), ("text", 1, 16), (b"", 1, "16"), (b"", 1.0, 16)):
        with pytest.raises(TypeError):
            tail.repeated_share(*wrong)
    for wrong in ((bytes(4096), 1, 16), (b"", 0, 16), (b"", 1, 7), (b"", 1, 17), (bytes(64), -1, 16)):
        with pytest.raises(ValueError, match="expected"):
            tail.repeated_share(*wrong)
    with pytest.raises(OverflowError):
        tail.repeated_share(b"", 2**70, 16)
    with pytest.raises(TypeError):
        tail.code_share(b"bytes")
