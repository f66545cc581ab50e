"""The text of an answer, and its token ids where the engine sent them, from the bytes that were relayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from policies.features.request import Endpoint

_SAID = frozenset({"reasoning", "content"})


@dataclass(slots=True, init=False)
class Transcript:
    """What an engine wrote, in the order in which it came: reasoning, text and the arguments of calls.

    Parameters
    ----------
    token_ids, prompt_token_ids
        Empty where the engine did not send them (`return_token_ids`).
    """

    pieces: list[str]
    token_ids: list[int]
    prompt_token_ids: list[int]

    def __init__(self) -> None:
        self.pieces = []
        self.token_ids = []
        self.prompt_token_ids = []

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)

    def add(self, text: object) -> None:
        """Add a text; anything else is none."""
        if isinstance(text, str):
            self.pieces.append(text)


def read_answer(endpoint: Endpoint, answer: bytes, *, stream: bool) -> Transcript:
    """Read an answer; what makes no sense counts as absent.

    Parameters
    ----------
    answer
        A JSON document, or the events of a stream.
    """
    transcript = Transcript()
    for document in _events(answer) if stream else _whole(answer):
        _read(transcript, endpoint, document)
    return transcript


def read_document(endpoint: Endpoint, document: dict[str, Any]) -> Transcript:
    """Read an answer that is one document, and was parsed."""
    transcript = Transcript()
    _read(transcript, endpoint, document)
    return transcript


def _read(transcript: Transcript, endpoint: Endpoint, document: dict[str, Any]) -> None:
    if endpoint is Endpoint.MESSAGES:
        _read_message(transcript, document)
    elif endpoint is Endpoint.RESPONSES:
        _read_response(transcript, document)
    else:
        _read_choice(transcript, document)


def _events(answer: bytes) -> Iterator[dict[str, Any]]:
    found = [line[5:] for line in answer.split(b"\n") if line.startswith(b"data:") and not line.startswith(b"data: [D")]
    try:
        documents = orjson.loads(b"[" + b",".join(found) + b"]")  # in one go, which is a third faster
    except orjson.JSONDecodeError:
        for line in found:
            yield from _whole(line)
        return
    yield from (document for document in documents if isinstance(document, dict))


def _whole(text: bytes) -> Iterator[dict[str, Any]]:
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError:
        return  # an event that was cut
    if isinstance(document, dict):
        yield document


def _read_choice(transcript: Transcript, document: dict[str, Any]) -> None:
    """Read a chat or completions answer, or a chunk of one: its first choice."""
    if "prompt_token_ids" in document:
        _add_ids(transcript.prompt_token_ids, document["prompt_token_ids"])
    choices = document.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict) or choice.get("index"):
            continue
        if "token_ids" in choice:
            _add_ids(transcript.token_ids, choice["token_ids"])
            _add_ids(transcript.prompt_token_ids, choice.get("prompt_token_ids"))
        said = choice.get("delta") or choice.get("message")
        if not isinstance(said, dict):
            transcript.add(choice.get("text"))
            continue
        for name, text in said.items():
            if name in _SAID or (name == "reasoning_content" and "reasoning" not in said):  # its name of old
                transcript.add(text)
            elif name == "tool_calls":
                for call in _dicts(text):
                    if isinstance(function := call.get("function"), dict):
                        transcript.add(function.get("name"))
                        transcript.add(function.get("arguments"))


def _read_message(transcript: Transcript, document: dict[str, Any]) -> None:
    """Read an answer of Anthropic's messages, or an event of one."""
    for block in _dicts(document.get("content")):
        transcript.add(block.get("thinking"))
        transcript.add(block.get("text"))
        if isinstance(arguments := block.get("input"), dict):
            transcript.add(orjson.dumps(arguments).decode())
    delta = document.get("delta")
    if document.get("type") == "content_block_delta" and isinstance(delta, dict):
        transcript.add(delta.get("thinking"))
        transcript.add(delta.get("text"))
        transcript.add(delta.get("partial_json"))


def _read_response(transcript: Transcript, document: dict[str, Any]) -> None:
    """Read an answer of the responses API, or an event of one: its deltas, not the texts that sum them up."""
    if str(document.get("type", "")).endswith(".delta"):
        transcript.add(document.get("delta"))
    for item in _dicts(document.get("output")):
        for part in _dicts(item.get("content")):
            transcript.add(part.get("text"))
        transcript.add(item.get("arguments"))


def _dicts(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _add_ids(ids: list[int], found: object) -> None:
    if isinstance(found, list) and all(isinstance(one, int) for one in found):
        ids += found
