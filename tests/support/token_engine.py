"""A deterministic engine with vLLM's events, for scripted upstreams and for tests without sockets.

Its next token depends on the number of tokens so far alone, so that a continued answer must equal an uninterrupted one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

PIECES = ("def", " f", "(x", "):", "\n", "   ", " return", " x", " # ", "\u00e9", "ST", "OP", " 1", "", "\U0001f600")
"""Texts of the tokens by id; those of `_BYTES` are parts of characters."""

_BYTES = {100 + at: bytes([byte]) for at, byte in enumerate("\u00fc\U0001f680".encode())}
PROMPT_IDS = (7, 3, 11)


def decode(ids: Sequence[int]) -> str:
    """Return the text of tokens, with U+FFFD for an incomplete character."""
    return b"".join(_BYTES[token] if token in _BYTES else PIECES[token].encode() for token in ids).decode(
        "utf-8", "replace"
    )


def shown_chars(ids: Sequence[int], stops: Sequence[str] = ()) -> int:
    """Return how many characters of an unfinished answer an engine has shown."""
    text = decode(ids)
    complete = len(text.rstrip("\ufffd")) if text.endswith("\ufffd") else len(text)
    return max(0, complete - (max(map(len, stops), default=1) - 1))


@dataclass
class TokenEngine:
    """Answers a request with `script`, from where its prompt ends.

    Parameters
    ----------
    script
        All tokens of the answer.
    step
        Tokens of a chunk.
    """

    script: Sequence[int]
    step: int = 1
    name: str = "a"
    seen: list[dict[str, Any]] = field(default_factory=list)

    def events(self, body: dict[str, Any], *, chat: bool) -> Iterator[bytes]:
        """Yield the events of an answer."""
        self.seen.append(body)
        before = 0 if chat or not isinstance(body["prompt"], list) else len(body["prompt"]) - len(PROMPT_IDS)
        prompt_ids = list(PROMPT_IDS) if before <= 0 else body["prompt"]
        before = max(0, before)
        assert list(self.script[:before]) == prompt_ids[len(PROMPT_IDS) :]
        limit = body.get("max_tokens") or (None if chat else 16)
        ids = list(self.script[before:])[:limit]
        is_limited = len(ids) < len(self.script) - before
        stop = body.get("stop") or []
        stops = [stop] if isinstance(stop, str) else stop
        offset = len(decode(self.script[:before]))
        head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{self.name}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": hash(self.name) % 1000,
            "model": "m",
        }
        with_ids, usage = bool(body.get("return_token_ids")), {"prompt_tokens": len(prompt_ids)}
        options = body.get("stream_options") or {}
        if chat:
            delta = {"role": "assistant", "content": ""}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            yield _event(head | {"choices": [choice], "prompt_token_ids": prompt_ids if with_ids else None})
        shown, done, is_first = 0, 0, True
        while True:
            since, done = done, min(len(ids), done + self.step)
            text = decode(self.script[: before + done])[offset:]
            cut = min((at for each in stops if (at := text.find(each)) >= 0), default=-1)
            is_last = cut >= 0 or done == len(ids)
            found = next((each for each in stops if cut >= 0 and text.startswith(each, cut)), None)
            if cut >= 0:
                until = cut + (len(found or "") if body.get("include_stop_str_in_output") else 0)
            elif is_last:
                until = len(text)
            else:
                held = () if body.get("include_stop_str_in_output") else stops
                until = max(shown, shown_chars(self.script[: before + done], held) - offset)
            reason = ("stop" if cut >= 0 or not is_limited else "length") if is_last else None
            piece, shown = text[shown:until], until
            choice = {"index": 0, "delta": {"content": piece}} if chat else {"index": 0, "text": piece}
            choice |= {"finish_reason": reason, "token_ids": ids[since:done] if with_ids else None}
            if not chat:
                choice["prompt_token_ids"] = prompt_ids if with_ids and is_first else None
            is_first = False
            if is_last:
                choice["stop_reason"] = found
            version = {"system_fingerprint": "v1"} if is_last and not options.get("include_usage") else {}
            yield _event(head | {"choices": [choice]} | version)
            if is_last:
                break
        if options.get("include_usage"):
            usage |= {"completion_tokens": done, "total_tokens": done + len(prompt_ids)}
            yield _event(head | {"choices": [], "usage": usage, "metrics": {"queue_time_ms": 1.0}})
        yield b"data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def answer_of(events: bytes) -> tuple[str, str, dict[str, Any] | None]:
    """Return the text, the finish reason and the usage of a stream."""
    text, reason, usage = "", "", None
    for line in events.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        document = json.loads(line[6:])
        assert "error" not in document, document
        usage = document.get("usage") or usage
        for choice in document["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            reason = choice["finish_reason"] or reason
    return text, reason, usage
