"""The usage in answers."""

from __future__ import annotations

import pytest

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


def test_usage_of_the_messages_api_counts_cached_tokens_apart() -> None:
    counts = {"input_tokens": 60, "cache_read_input_tokens": 128, "cache_creation_input_tokens": 16}
    read = read_usage({"usage": {**counts, "output_tokens": 3}})
    assert read is not None
    assert (read.prompt_tokens, read.output_tokens, read.cached_tokens) == (204, 3, 128)
    proxied = read_usage({"usage": {**counts, "prompt_tokens": 204}})
    assert proxied is not None
    assert proxied.prompt_tokens == 204, "such as LiteLLM's, which has the fields of both"


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
