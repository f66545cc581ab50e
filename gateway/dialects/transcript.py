"""The text of a relayed answer, and its token ids if the engine sent them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import orjson

from policies.features.request import Endpoint

_TEXT_FIELDS = frozenset({"reasoning", "content"})


class Transcript:
    """The output of an engine in order: reasoning, text and arguments of tool calls.

    Examples
    --------
    >>> transcript = Transcript()
    >>> for piece in ("Hello, ", None, "world"):
    ...     transcript.add(piece)
    >>> transcript.text
    'Hello, world'
    """

    def __init__(self) -> None:
        self.pieces: list[str] = []  # the texts, one per field or chunk
        # token_ids, prompt_token_ids: empty unless the engine sent them (`return_token_ids`).
        self.token_ids: list[int] = []
        self.prompt_token_ids: list[int] = []

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)

    def add(self, text: object) -> None:
        """Append a text; values of other types are ignored."""
        if isinstance(text, str):
            self.pieces.append(text)


def read_answer(endpoint: Endpoint, answer: bytes, *, stream: bool) -> Transcript:
    """Return the transcript of an answer; malformed parts are ignored.

    Examples
    --------
    >>> read_answer(Endpoint.CHAT, b'{"choices": [{"message": {"content": "Hello"}}]}', stream=False).text
    'Hello'
    """
    transcript, read = Transcript(), _READERS.get(endpoint, _read_choice)
    for document in documents_of(answer, stream=stream):
        read(transcript, document)
    return transcript


def read_document(endpoint: Endpoint, document: dict[str, Any]) -> Transcript:
    """Return the transcript of an answer that is one parsed JSON document."""
    transcript = Transcript()
    _READERS.get(endpoint, _read_choice)(transcript, document)
    return transcript


def documents_of(answer: bytes, *, stream: bool) -> Iterator[dict[str, Any]]:
    """Yield the JSON documents of an answer; malformed ones are left out."""
    return _events(answer) if stream else _whole(answer)


def _events(answer: bytes) -> Iterator[dict[str, Any]]:
    events = [
        line[5:] for line in answer.split(b"\n") if line.startswith(b"data:") and not line.startswith(b"data: [D")
    ]
    try:
        documents = orjson.loads(b"[" + b",".join(events) + b"]")  # one call is a third faster
    except orjson.JSONDecodeError:
        for event in events:
            yield from _whole(event)
        return
    yield from (document for document in documents if isinstance(document, dict))


def _whole(text: bytes) -> Iterator[dict[str, Any]]:
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError:
        return  # a truncated event
    if isinstance(document, dict):
        yield document


def _read_choice(transcript: Transcript, document: dict[str, Any]) -> None:
    """Read the first choice of a chat or completions answer or chunk."""
    if "prompt_token_ids" in document:
        _add_ids(transcript.prompt_token_ids, document["prompt_token_ids"])
    choices = document.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict) or choice.get("index"):
            continue
        if "token_ids" in choice:
            _add_ids(transcript.token_ids, choice["token_ids"])
            _add_ids(transcript.prompt_token_ids, choice.get("prompt_token_ids"))
        message = choice.get("delta") or choice.get("message")
        if not isinstance(message, dict):
            transcript.add(choice.get("text"))
            continue
        for name, text in message.items():
            if name in _TEXT_FIELDS or (name == "reasoning_content" and "reasoning" not in message):  # its old name
                transcript.add(text)
            elif name == "tool_calls":
                for call in dicts(text):
                    if isinstance(function := call.get("function"), dict):
                        transcript.add(function.get("name"))
                        transcript.add(function.get("arguments"))


def _read_message(transcript: Transcript, document: dict[str, Any]) -> None:
    """Read an answer or event of Anthropic's messages API."""
    for block in dicts(document.get("content")):
        transcript.add(block.get("thinking"))
        transcript.add(block.get("text"))
        if isinstance(arguments := block.get("input"), dict):
            with contextlib.suppress(orjson.JSONEncodeError):  # nested too deeply to serialize
                transcript.add(orjson.dumps(arguments).decode())
    delta = document.get("delta")
    if document.get("type") == "content_block_delta" and isinstance(delta, dict):
        transcript.add(delta.get("thinking"))
        transcript.add(delta.get("text"))
        transcript.add(delta.get("partial_json"))


def _read_response(transcript: Transcript, document: dict[str, Any]) -> None:
    """Read an answer or event of the responses API: the deltas, not the later events that repeat their text."""
    if str(document.get("type", "")).endswith(".delta"):
        transcript.add(document.get("delta"))
    for item in dicts(document.get("output")):
        for part in dicts(item.get("content")):
            transcript.add(part.get("text"))
        transcript.add(item.get("arguments"))


def dicts(value: object) -> list[dict[str, Any]]:
    """Return the objects in a list; none if it is something else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _add_ids(ids: list[int], new_ids: object) -> None:
    if isinstance(new_ids, list) and all(isinstance(token_id, int) for token_id in new_ids):
        ids += new_ids


_READERS: Final = {Endpoint.MESSAGES: _read_message, Endpoint.RESPONSES: _read_response}
