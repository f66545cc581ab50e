"""Prompts from files: ShareGPT conversations and JSON lines."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from backends.validation import UsageError
from lab.bench.prompts import Prompt

_CHARACTERS_PER_TOKEN = 4.0
# The bounds that `vllm bench serve` puts on ShareGPT conversations.
_MIN_TOKENS = 4
_MAX_PROMPT_TOKENS = 1024
_MAX_TOTAL_TOKENS = 2048

CountTokens = Callable[[str], int]


def token_counter(path: Path | None) -> CountTokens:
    """Return a function that counts the tokens of a text.

    Examples
    --------
    >>> token_counter(None)("four words of text")
    4
    """
    if path is None:
        return lambda text: max(1, round(len(text) / _CHARACTERS_PER_TOKEN))
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        # The library raises bare `Exception`s from Rust for any invalid file.
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001
        raise UsageError(f"--tokenizer: {file}: {error}") from None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def read_dataset(path: Path, count_tokens: CountTokens, output_tokens: int | None, *, chat: bool) -> list[Prompt]:
    """Read the prompts of a file: ShareGPT's format if it is one JSON list, else JSON lines; `.gz` is decompressed."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise UsageError(f"--dataset: {path}: {error}") from None
    if data.lstrip()[:1] == b"[":
        prompts = list(_sharegpt(path, data, count_tokens, output_tokens))
    else:
        prompts = list(_lines(path, data, output_tokens, chat=chat))
    if not prompts:
        raise UsageError(f"--dataset: {path}: holds no prompt that can be used")
    return prompts


def _sharegpt(path: Path, data: bytes, count_tokens: CountTokens, output_tokens: int | None) -> Iterator[Prompt]:
    try:
        entries = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"--dataset: {path}: not JSON: {error}") from None
    for index, entry in enumerate(entries):
        turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, Mapping) else None
        if not isinstance(turns, list):
            raise UsageError(f"--dataset: {path}: entry {index} has no list 'conversations': not ShareGPT's format")
        values = [turn.get("value") for turn in turns[:2] if isinstance(turn, Mapping)]
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) < 2:
            continue
        question, answer = count_tokens(texts[0]), count_tokens(texts[1])
        limit = output_tokens or answer
        too_short = question < _MIN_TOKENS or (output_tokens is None and answer < _MIN_TOKENS)
        if not too_short and question <= _MAX_PROMPT_TOKENS and question + limit <= _MAX_TOTAL_TOKENS:
            yield Prompt(texts[0], output_tokens=limit)


def _lines(path: Path, data: bytes, output_tokens: int | None, *, chat: bool) -> Iterator[Prompt]:
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            try:
                yield _line(orjson.loads(line), output_tokens, chat=chat)
            except orjson.JSONDecodeError as error:
                raise UsageError(f"--dataset: {path}:{number}: not JSON: {error}") from None
            except ValueError as error:
                raise UsageError(f"--dataset: {path}:{number}: {error}") from None


def _line(entry: Any, output_tokens: int | None, *, chat: bool) -> Prompt:
    if not isinstance(entry, Mapping):
        raise ValueError("expected an object")  # noqa: TRY004 -- invalid data, reported with its line
    recorded = entry.get("output_tokens")
    if recorded is not None and (not isinstance(recorded, int) or isinstance(recorded, bool) or recorded < 1):
        raise ValueError("'output_tokens' must be a whole number above 0")
    limit = output_tokens or recorded
    text, messages = entry.get("prompt"), entry.get("messages")
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        if not chat:
            raise ValueError("'messages' need --endpoint chat")
        return Prompt(messages=messages, output_tokens=limit)
    if isinstance(text, str) and text:
        return Prompt(text, output_tokens=limit)
    raise ValueError("needs 'prompt' (text) or 'messages' (a conversation)")


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and "role" in value
