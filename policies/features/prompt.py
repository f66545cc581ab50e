"""The prompt of a request, read from the body of any supported API."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final
from zlib import crc32

import orjson

SYSTEM_CHARS: Final = 256
"""Characters of a system prompt that count; applications put the date, user or retrieved passages further on."""

HEAD_CHARS: Final = 64
"""Characters of the first line that count if there is no system prompt: usually an instruction, not its subject."""

HEAD_IDS: Final = 32
"""Token ids that count in a prompt of token ids; more than a chat template starts with."""


def template_of_system_prompt(text: str) -> str:
    """Return eight hex digits for a system prompt; empty if the prompt is."""
    return _of_head(text[:SYSTEM_CHARS])


def template_of_prompt(text: str) -> str:
    """Return eight hex digits for the first non-blank line of a prompt."""
    head, _, _ = text[: 4 * HEAD_CHARS].lstrip().partition("\n")
    return _digest(head[:HEAD_CHARS].rstrip())


def template_of_token_ids(ids: list[int]) -> str:
    """Return eight hex digits for the first token ids of a prompt."""
    return _digest(",".join(map(str, ids[:HEAD_IDS])))


def template_of_adapter(adapter: str, template: str) -> str:
    """Return eight hex digits for a template under a LoRA adapter."""
    return _digest(f"{adapter}\n{template}")


@lru_cache(maxsize=1024)  # an application sends the same text each time; a hit takes a third of the computation
def _of_head(head: str) -> str:
    return _digest(head.strip())


def _digest(text: str) -> str:
    # Unlike hash(), the same in every process and on every machine. A collision only merges two applications.
    return crc32(text.encode("utf-8", "surrogatepass")).to_bytes(4, "big").hex() if text else ""


TAIL_CHARS: Final = 1024
"""Characters at the end of a prompt that the features consider: the task usually stands there."""

BYTES_PER_TOKEN: Final = 4.0
"""Estimated UTF-8 bytes per token: 4 to 4.5 in English prose with today's vocabularies, fewer in code."""

TOKENS_PER_MESSAGE: Final = 5
"""Tokens that a chat template adds to a message: header, role, end of turn."""

MAX_PREFIX_TEXTS: Final = 2048
"""Texts of a prompt that are hashed for `prefix_hashes`; later texts of a longer conversation are ignored."""

MAX_PREFIXES: Final = 64
"""Prefixes of a prompt that `prefix_hashes` returns at most: the longest ones, and some shorter ones."""

MIN_PREFIX_TOKENS: Final = 32
"""Length of the shortest prefix that is worth finding in a prefix cache."""


_IMAGES: Final = ("image_url", "input_image", "image")


class Prompt:
    """The prompt of a request."""

    def __init__(
        self, pieces: list[str] | None = None, ids: list[int] | None = None, turns: int = 1, batch: int = 1
    ) -> None:
        # Texts in order, including the system prompt; for a batch of prompts, those of the last one.
        self.pieces: list[str] = [] if pieces is None else pieces
        self.system: list[str] = []  # texts of the system prompt
        # Token ids, if the prompt was sent as ids; for a batch, those of the last prompt.
        self.ids: list[int] = [] if ids is None else ids
        self.size_bytes = 0  # UTF-8 bytes of all texts
        self.id_count = len(self.ids)  # number of token ids in all prompts
        self.turns = turns  # number of messages, without the system prompt
        self.batch = batch  # number of independent prompts in the request
        self.has_images = False

    @property
    def tokens(self) -> int:
        """Number of tokens: exact for token ids, an estimate for text."""
        if not self.size_bytes:
            return self.id_count
        return self.id_count + round(self.size_bytes / BYTES_PER_TOKEN) + TOKENS_PER_MESSAGE * self.turns

    def tail(self) -> str:
        """Return the last `TAIL_CHARS` characters of the text."""
        parts: list[str] = []
        room = TAIL_CHARS
        for piece in reversed(self.pieces):
            parts.append(piece[-room:])
            room -= len(piece) + 1
            if room <= 0:
                break
        parts.reverse()
        return "\n".join(parts)


def read_prompt(body: dict[str, Any]) -> Prompt:
    """Return the prompt in a request body of any API.

    Reads `messages` (chat, and Anthropic's with `system`), `prompt` (completions) and `input` (responses with
    `instructions`, and embeddings). Images and other media are ignored, and so are fields of the wrong type.
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
        prompt.size_bytes += len(_as_json(tools))  # the chat template inserts them into the prompt
    return prompt


def prefix_hashes(prompt: Prompt) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a hash for each prefix of a prompt that ends with one of its texts, and the estimated tokens of each.

    A request that continues a conversation shares prefixes with the earlier requests, and all requests of an
    application share its system prompt, as they do in an engine's prefix cache. Of a long conversation, those that end
    with its last texts are returned, because its next request shares them, and every second, fourth, eighth ... of the
    others, counted from the first. The hashes are the same in every gateway.
    """
    hashes: list[int] = []
    tokens: list[int] = []
    prefix, size = 0, 0.0
    for piece in prompt.pieces[:MAX_PREFIX_TEXTS]:
        prefix = hash((prefix, crc32(piece.encode("utf-8", "surrogatepass")), len(piece)))
        size += len(piece) / BYTES_PER_TOKEN + TOKENS_PER_MESSAGE
        if size >= MIN_PREFIX_TOKENS:
            hashes.append(prefix)
            tokens.append(int(size))
    if len(hashes) > MAX_PREFIXES:
        later = len(hashes) - MAX_PREFIXES // 2
        apart = 1
        while later > apart * (MAX_PREFIXES // 2):
            apart *= 2
        hashes = hashes[:later:apart] + hashes[later:]
        tokens = tokens[:later:apart] + tokens[later:]
    return tuple(hashes), tuple(tokens)


def _read_messages(messages: list[Any], system: object) -> Prompt:
    prompt = Prompt(turns=0)
    if system:
        _add_system(prompt, system)
    for message in messages:
        if not isinstance(message, dict):
            continue
        before = len(prompt.pieces)
        _add_texts(prompt.pieces, content := message.get("content"))
        if isinstance(content, list) and not prompt.has_images:
            prompt.has_images = any(isinstance(part, dict) and part.get("type") in _IMAGES for part in content)
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
    """Add the arguments of tool calls, and their output in the responses API, which stand beside `content`."""
    _add_texts(pieces, message.get("output"))
    _add_texts(pieces, message.get("arguments"))
    if isinstance(calls := message.get("tool_calls"), list):
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                _add_texts(pieces, function.get("arguments"))


def _read_plain(value: object) -> Prompt:
    if isinstance(value, str):
        return Prompt(pieces=[value])
    if not isinstance(value, list) or not value:
        return Prompt()
    if isinstance(value[0], int):
        return Prompt(ids=value)
    prompt = Prompt(batch=len(value))
    *others, last = value
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
    except TypeError:  # integers above 64 bits, lone surrogates, excessive nesting
        return b""
