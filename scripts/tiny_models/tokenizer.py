"""A byte-level BPE tokenizer with the tokens of a chat, in the files that transformers and vLLM read."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .corpus import CHAT_TEMPLATE

VOCABULARY = 2048
CONTEXT_TOKENS = 2048
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, END_ID = 0, 2


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of `VOCABULARY` tokens on `texts`; the three special tokens have the ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True) for token in (PAD, START, END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        model_max_length=CONTEXT_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )
