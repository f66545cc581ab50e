"""The usage in answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.usage import Usage, read_usage

SPECULATION = {"num_draft_tokens": 30, "num_accepted_draft_tokens": 60, "num_spec_steps": 20}
CHAT = {
    "usage": {"prompt_tokens": 7, "completion_tokens": 100, "prompt_tokens_details": {"cached_tokens": 4}},
    "metrics": {
        "queue_time_ms": 1.5,
        "generation_time_ms": 500,
        "speculative_decoding": SPECULATION,
    },
}


def test_usage_of_a_chat_answer() -> None:
    read = read_usage(CHAT)
    assert read is not None
    assert (read.prompt_tokens, read.output_tokens, read.cached_tokens) == (7, 100, 4)
    assert (read.drafted_tokens, read.accepted_tokens, read.drafting_steps) == (30, 60, 20)
    assert (read.queue_s, read.generation_s) == (0.0015, 0.5)


@pytest.mark.parametrize(
    ("output", "accepted", "drafting", "expected"),
    [
        (100, 60, 20, 2.5),
        (100, 0, 0, 1.0),
        (100, 99, 12, 100 / 12),  # the last step accepted more tokens than the answer still needed
        (100, None, 0, None),
        (0, 0, 0, None),
        (5, 5, 0, None),
    ],
)
def test_tokens_per_step(output: int, accepted: int | None, drafting: int, expected: float | None) -> None:
    usage = Usage(output_tokens=output, accepted_tokens=accepted, drafting_steps=drafting)
    assert usage.tokens_per_step == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(usage=json_values, metrics=json_values, details=json_values)
def test_any_json_is_read_without_an_error(usage: Any, metrics: Any, details: Any) -> None:
    read_usage(usage)
    read_usage({"usage": usage, "metrics": metrics})
    read_usage({"usage": {"prompt_tokens_details": details}, "metrics": {"speculative_decoding": metrics}})
