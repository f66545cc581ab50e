"""The prompt of a request, read from the body of any supported API."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final
from zlib import crc32

import orjson

from policies.features.parts import STORED, StoredTokens, name_of_part, sized

SYSTEM_CHARS: Final = 256
"""Characters of a system prompt that count; applications put the date, user or retrieved passages further on."""

HEAD_CHARS: Final = 64
"""Characters of the first line that count if there is no system prompt: usually an instruction, not its subject."""

HEAD_IDS: Final = 32
"""Token ids that count in a prompt of token ids; more than a chat template starts with."""


def template_of_system_prompt(text: str) -> str:
    """Return eight hex digits for a system prompt; empty if it is empty."""
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


@lru_cache(maxsize=1024)  # an application sends the same text each time; a hit takes a third of the time
def _of_head(head: str) -> str:
    return _digest(head.strip())


def _digest(text: str) -> str:
    # Unlike hash(), the same in every process and on every machine. A collision only merges two applications.
    return crc32(text.encode("utf-8", "surrogatepass")).to_bytes(4, "big").hex() if text else ""


TAIL_CHARS: Final = 1024
"""Characters at the end of a prompt that the features consider: it usually contains the task."""

BYTES_PER_TOKEN: Final = 4.0
"""Estimated UTF-8 bytes per token: 4 to 4.5 in English prose with today's vocabularies, fewer in code."""

TOKENS_PER_MESSAGE: Final = 5
"""Tokens that a chat template adds to a message: header, role, end of turn."""

MAX_PREFIX_TEXTS: Final = 2048
"""Texts of a prompt that are hashed for `prefix_hashes`; later texts of a longer conversation are ignored."""

MAX_PREFIXES: Final = 64
"""Most prefixes that `prefix_hashes` returns: the longest ones, and some shorter ones."""

MIN_PREFIX_TOKENS: Final = 32
"""Length of the shortest prefix worth finding in a prefix cache."""


_READ: Final = frozenset({"content", "output", "arguments", "tool_calls", "function_call"})
_BARE: Final = _READ | {"role", "name", "type", "id", "call_id", "status", "refusal"}
"""Fields of a message with no content besides what is read."""
_DEEPEST: Final = 4
_OPTIONS: Final = ("mm_processor_kwargs", "media_io_kwargs")
"""Parameters that change how many tokens an engine makes of a part."""
_INSERTED: Final = ("tools", "functions", "documents")
"""Fields that the chat template inserts into the prompt."""
RARE_PROMPT_FIELDS: Final = frozenset({"prompt_embeds", "previous_response_id", "conversation", *_INSERTED, *_OPTIONS})
_MOST_OPTIONS: Final = 16
_REFERENCE: Final = "item_reference"


class Prompt:
    """The prompt of a request."""

    def __init__(
        self, pieces: list[str] | None = None, ids: list[int] | None = None, turns: int = 1, batch: int = 1
    ) -> None:
        # Texts in order, including the system prompt; for a batch of prompts, of the last one.
        self.pieces: list[str] = [] if pieces is None else pieces
        self.system: list[str] = []  # texts of the system prompt
        # Token ids, if the prompt was sent as ids; for a batch, those of the last prompt.
        self.ids: list[int] = [] if ids is None else ids
        self.size_bytes = 0  # UTF-8 bytes of all texts
        self.id_count = len(self.ids)  # number of token ids in all prompts
        self.turns = turns  # number of messages, without the system prompt
        self.batch = batch  # number of independent prompts in the request
        self.parts: dict[str, int] | None = None  # number of parts other than text, by `parts.name_of_part`

    def add_part(self, name: str) -> None:
        """Count a part other than text."""
        if self.parts is None:
            self.parts = {}
        self.parts[name] = self.parts.get(name, 0) + 1

    @property
    def tokens(self) -> int:
        """Number of tokens without those of `parts`: exact for token ids, an estimate for text."""
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

    It reads `messages` (chat, and Anthropic's with `system`), `prompt` (completions) and `input` (responses with
    `instructions`, and embeddings), and ignores fields of the wrong type.
    """
    plain = None
    if isinstance(messages := body.get("messages"), list):
        prompt = _read_messages(messages, body.get("system"))
    elif (plain := body.get("prompt")) is not None and not isinstance(plain, dict):
        prompt = _read_plain(plain)
    elif isinstance(items := body.get("input"), list) and any(isinstance(item, dict) for item in items):
        prompt = _read_messages(items, body.get("instructions"))
    else:
        prompt = _read_plain(body.get("input"))
        _add_system(prompt, body.get("instructions"))
    if isinstance(plain, dict):  # a stored prompt, by its id
        prompt.add_part("prompt")
    for piece in prompt.pieces:
        prompt.size_bytes += _utf8_length(piece)
    return prompt


def read_other(document: dict[str, Any], size_bytes: int) -> Prompt:
    """Return the prompt of a request that is only passed through: unknown fields count as text, a form as a part."""
    prompt = read_prompt(document)
    if not (prompt.size_bytes or prompt.id_count or prompt.parts):
        if document:
            prompt.size_bytes = size_bytes
        elif size_bytes:
            prompt.add_part(sized("form", size_bytes))
    return prompt


def add_rare(prompt: Prompt, body: dict[str, Any], stored: StoredTokens | None) -> None:
    """Add what few prompts have: fields that the chat template inserts, embeddings, and stored conversations."""
    for name in _INSERTED:
        if (inserted := body.get(name)) and (
            name != "documents" or "messages" in body
        ):  # elsewhere, documents are ranked
            prompt.size_bytes += len(_as_json(inserted))
    if embeds := body.get("prompt_embeds"):
        for each in embeds if isinstance(embeds, list) else [embeds]:
            prompt.add_part(sized("embeds", len(each) if isinstance(each, str) else 0))
    if conversation := stored_in(body):
        known = 0 if stored is None else stored(conversation)
        prompt.id_count += known
        if not known:
            prompt.add_part(STORED)
    if prompt.parts and (options := [body[name] for name in _OPTIONS if body.get(name)]):
        kind = crc32(_as_json(options)) % _MOST_OPTIONS
        prompt.parts = {f"{name} options {kind}": count for name, count in prompt.parts.items()}


def stored_in(body: dict[str, Any]) -> str:
    """Return the id of the stored response or conversation that a request continues; empty without one.

    Examples
    --------
    >>> stored_in({"previous_response_id": "resp_1"}), stored_in({"conversation": {"id": "conv_1"}})
    ('resp_1', 'conv_1')
    """
    found = body.get("previous_response_id") or body.get("conversation")
    if isinstance(found, dict):
        found = found.get("id")
    return found if isinstance(found, str) else ""


def prefix_hashes(prompt: Prompt) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a hash for each prefix of a prompt that ends with one of its texts, and the estimated tokens of each.

    A request that continues a conversation shares prefixes with the earlier requests, and all requests of an
    application share its system prompt, as in an engine's prefix cache. For a long conversation, it returns those that
    end with its last texts, because its next request shares them, and every second, fourth, eighth ... of the others,
    counted from the first. The hashes are the same in every gateway.
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
        _add_content(prompt, content := message.get("content"))
        if message.get("role") in ("system", "developer") and not prompt.turns:
            prompt.system += prompt.pieces[before:]
            continue
        prompt.turns += 1
        if len(message) > 2:
            _add_tool_traffic(prompt, message)
        if content is None and len(prompt.pieces) == before:
            _add_item(prompt, message)
    prompt.turns = max(1, prompt.turns)
    return prompt


def _add_system(prompt: Prompt, system: object) -> None:
    before = len(prompt.pieces)
    _add_content(prompt, system)
    texts = prompt.pieces[before:]
    del prompt.pieces[before:]
    prompt.system += texts
    prompt.pieces[:0] = texts


def _add_content(prompt: Prompt, content: object, deepest: int = _DEEPEST) -> None:
    if isinstance(content, str):
        prompt.pieces.append(content)
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, str):
                prompt.pieces.append(part)
            elif isinstance(part, dict):
                _add_part(prompt, part, deepest)
    elif isinstance(content, dict):
        _add_part(prompt, content, deepest)


def _add_part(prompt: Prompt, part: dict[str, Any], deepest: int) -> None:
    if isinstance(text := part.get("text"), str):
        prompt.pieces.append(text)
    elif isinstance(arguments := part.get("input"), dict):  # Anthropic's tool_use
        prompt.pieces.append(_as_json(arguments).decode())
    elif "content" in part and deepest:  # Anthropic's tool_result
        _add_content(prompt, part["content"], deepest - 1)
    elif isinstance(text := part.get("thinking"), str) or isinstance(text := part.get("refusal"), str):
        prompt.pieces.append(text)
    else:
        prompt.add_part(name_of_part(part))


def _add_tool_traffic(prompt: Prompt, message: dict[str, Any]) -> None:
    """Add the arguments of tool calls, and their output in the responses API, which are not in `content`."""
    _add_content(prompt, message.get("output"))
    _add_arguments(prompt, message)
    if isinstance(calls := message.get("tool_calls"), list):
        for call in calls:
            _add_arguments(prompt, call.get("function") if isinstance(call, dict) else None)


def _add_arguments(prompt: Prompt, call: object) -> None:
    if isinstance(call, dict) and isinstance(arguments := call.get("arguments"), str):
        prompt.pieces.append(arguments)


def _add_item(prompt: Prompt, item: dict[str, Any]) -> None:
    """Count an item of the responses API without text: a stored item, hidden reasoning, an image."""
    _add_arguments(prompt, item.get("function_call"))  # of the chat API, before `tool_calls`
    if any(value is not None for name, value in item.items() if name not in _BARE) or item.get("type") == _REFERENCE:
        prompt.add_part(name_of_part(item))


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
