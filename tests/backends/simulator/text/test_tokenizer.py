"""The tokenizer round-trips every text, and shows only complete characters."""

from __future__ import annotations

from threading import Thread
from time import sleep

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.simulator.text import tokenizer
from backends.simulator.text.tokenizer import END_OF_TURN, START_OF_TURN

tokens = tokenizer.load()


@pytest.mark.slow
def test_others_run_while_a_long_text_is_encoded() -> None:
    thread, rounds = Thread(target=tokens.encode, args=("word " * 200_000,)), 0
    thread.start()
    while thread.is_alive():
        rounds += 1
        sleep(0)
    assert rounds > 100


@given(st.text(max_size=100))
def test_pieces_add_up_to_the_text(text: str) -> None:
    text = text.replace("<|", "")
    ids = tokens.encode(text)
    whole, lengths = tokens.pieces(ids)
    assert whole == text
    assert len(lengths) == len(ids)
    assert lengths == sorted(lengths)
    assert (lengths[-1] if lengths else 0) == len(text)


def test_a_character_split_over_tokens_is_shown_with_the_last_of_them() -> None:
    ids = tokens.encode("🎉")
    assert len(ids) > 1, "not a single token, or this proves nothing"
    _, lengths = tokens.pieces(ids)
    assert lengths[:-1] == [0] * (len(ids) - 1)
    assert lengths[-1] == 1


def test_the_vocabulary_is_unchanged() -> None:
    """Traces store token ids, so the asset must not change by accident."""
    assert len(tokens) == 4096
    assert tokens.encode("def f(x): return x") == [492, 283, 10, 90, 362, 375, 701]


def test_the_template_is_chatml() -> None:
    ids = tokens.chat_prompt([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
    assert tokens.decode(ids, special=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == START_OF_TURN
    assert ids.count(END_OF_TURN) == 2
