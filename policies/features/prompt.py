"""The prompt of a request, read from the body of any of the APIs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

TAIL_CHARS: Final = 1024
"""Of a long prompt's text, what the features look at: its end, where the task stands and the answer goes on."""

BYTES_PER_TOKEN: Final = 4.0
"""UTF-8 bytes of a token: 4 to 4.5 in English prose with the vocabularies of today, fewer in code."""

TOKENS_PER_MESSAGE: Final = 5
"""What a chat template puts around a message: header, role, end of turn."""

MOST_BEGINNINGS: Final = 64
"""Texts of a prompt that can end a beginning; of a longer conversation the rest is not told apart."""

SHORTEST_BEGINNING_TOKENS: Final = 32
"""A shorter beginning saves nothing worth telling."""


@dataclass(slots=True, init=False)
class Prompt:
    """What a request asks with.

    Parameters
    ----------
    pieces
        Its texts, in order, the system prompt among them; of a batch of prompts the last one alone.
    system
        The texts of the system prompt.
    ids
        The prompt, where it came as token ids; of a batch the last one.
    size_bytes
        UTF-8 bytes of all texts.
    id_count
        Token ids of all prompts that came as such.
    turns
        Messages but for the system prompt.
    batch
        Independent prompts in the request.
    """

    pieces: list[str]
    system: list[str]
    ids: list[int]
    size_bytes: int
    id_count: int
    turns: int
    batch: int

    def __init__(
        self,
        pieces: list[str] | None = None,
        system: list[str] | None = None,
        ids: list[int] | None = None,
        size_bytes: int = 0,
        id_count: int = 0,
        turns: int = 1,
        batch: int = 1,
    ) -> None:
        self.pieces = [] if pieces is None else pieces
        self.system = [] if system is None else system
        self.ids = [] if ids is None else ids
        self.size_bytes = size_bytes
        self.id_count = id_count
        self.turns = turns
        self.batch = batch

    @property
    def tokens(self) -> int:
        """Exact for token ids; for text an estimate."""
        if not self.size_bytes:
            return self.id_count
        return self.id_count + round(self.size_bytes / BYTES_PER_TOKEN) + TOKENS_PER_MESSAGE * self.turns

    def tail(self) -> str:
        """Return the last `TAIL_CHARS` characters of the text."""
        taken: list[str] = []
        room = TAIL_CHARS
        for piece in reversed(self.pieces):
            taken.append(piece[-room:])
            room -= len(piece) + 1
            if room <= 0:
                break
        taken.reverse()
        return "\n".join(taken)


def read_prompt(body: dict[str, Any]) -> Prompt:
    """Read the prompt, whatever API the body speaks and however wrong it is; what makes no sense counts as absent.

    `messages` are chat's and Anthropic's (whose `system` stands beside them), `prompt` the completions', `input` the
    responses' (with `instructions`) and the embeddings'. Images and other media are passed over.
    """
    if isinstance(messages := body.get("messages"), list):
        prompt = _read_messages(messages, body.get("system"))
    elif "prompt" in body:
        prompt = _read_plain(body["prompt"])
    elif isinstance(items := body.get("input"), list) and any(isinstance(item, dict) for item in items):
        prompt = _read_messages(items, body.get("instructions"))
    else:
        prompt = _read_plain(body.get("input"))
        _add_system(prompt, body.get("instructions"))
    for piece in prompt.pieces:
        prompt.size_bytes += _utf8_length(piece)
    if tools := body.get("tools"):
        prompt.size_bytes += len(_as_json(tools))  # the chat template writes them into the prompt
    return prompt


def beginnings(prompt: Prompt) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return hashes of the beginnings of a prompt that end with one of its texts, and the tokens of each (estimated).

    A conversation that goes on has those of its earlier requests, and all requests of an application those of its
    system prompt: what an engine's prefix cache knows them by. The hashes mean nothing to another process.
    """
    hashes: list[int] = []
    tokens: list[int] = []
    beginning, size = 0, 0.0
    for piece in prompt.pieces[:MOST_BEGINNINGS]:
        beginning = hash((beginning, piece))
        size += len(piece) / BYTES_PER_TOKEN + TOKENS_PER_MESSAGE
        if size >= SHORTEST_BEGINNING_TOKENS:
            hashes.append(beginning)
            tokens.append(int(size))
    return tuple(hashes), tuple(tokens)


def _read_messages(messages: list[Any], system: object) -> Prompt:
    prompt = Prompt(turns=0)
    _add_system(prompt, system)
    for message in messages:
        if not isinstance(message, dict):
            continue
        before = len(prompt.pieces)
        _add_texts(prompt.pieces, message.get("content"))
        if message.get("role") in ("system", "developer") and not prompt.turns:
            prompt.system += prompt.pieces[before:]
            continue
        prompt.turns += 1
        if len(message) > 2:
            _add_tool_traffic(prompt.pieces, message)
    prompt.turns = max(1, prompt.turns)
    return prompt


def _add_system(prompt: Prompt, system: object) -> None:
    texts: list[str] = []
    _add_texts(texts, system)
    prompt.system += texts
    prompt.pieces[:0] = texts


def _add_texts(pieces: list[str], content: object) -> None:
    if isinstance(content, str):
        pieces.append(content)
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, str):
                pieces.append(part)
            elif isinstance(part, dict):
                _add_part(pieces, part)


def _add_part(pieces: list[str], part: dict[str, Any]) -> None:
    if isinstance(text := part.get("text"), str):
        pieces.append(text)
    elif isinstance(arguments := part.get("input"), dict):  # Anthropic's tool_use
        pieces.append(_as_json(arguments).decode())
    elif isinstance(result := part.get("content"), str):  # Anthropic's tool_result
        pieces.append(result)
    elif isinstance(result, list):
        texts = (inner.get("text") for inner in result if isinstance(inner, dict))
        pieces.extend(text for text in texts if isinstance(text, str))


def _add_tool_traffic(pieces: list[str], message: dict[str, Any]) -> None:
    """Add what an agent's turn holds beside `content`: calls with their arguments, and in responses their output."""
    _add_texts(pieces, message.get("output"))
    _add_texts(pieces, message.get("arguments"))
    if isinstance(calls := message.get("tool_calls"), list):
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                _add_texts(pieces, function.get("arguments"))


def _read_plain(given: object) -> Prompt:
    if isinstance(given, str):
        return Prompt(pieces=[given])
    if not isinstance(given, list) or not given:
        return Prompt()
    if isinstance(given[0], int):
        return Prompt(ids=given, id_count=len(given))
    prompt = Prompt(batch=len(given))
    *others, last = given
    for other in others:
        if isinstance(other, str):
            prompt.size_bytes += _utf8_length(other)
        elif isinstance(other, list):
            prompt.id_count += len(other)
    if isinstance(last, str):
        prompt.pieces.append(last)
    elif isinstance(last, list):
        prompt.ids = last
        prompt.id_count += len(last)
    return prompt


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _as_json(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # integers past 64 bits, lone surrogates, nesting without end
        return b""
