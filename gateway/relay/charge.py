"""The tokens charged for a request that is only passed through: what the engine reports, or an estimate."""

from __future__ import annotations

import math
import re
from typing import Final

from gateway.dialects.usage import Usage
from policies.features.prompt import BYTES_PER_TOKEN

_AUDIO: Final = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
_AUDIO_TOKENS_PER_S: Final = 50
"""Positions of Whisper's encoder: 1,500 for each 30 s."""

_AUDIO_BYTES_PER_S: Final = 8_000
"""Of a compressed recording, 64 kbit/s; few are smaller than a third of this."""

_WAV: Final = re.compile(rb"RIFF....WAVE.{0,256}?fmt .{16}", re.DOTALL)
_WAV_WITHIN_BYTES: Final = 4096


def tokens_of(path: str, body: bytes, usage: Usage | None, events: int) -> tuple[int, int]:
    """Return the prompt and output tokens that a request is charged.

    Examples
    --------
    >>> tokens_of("/tokenize", b"x" * 40, None, 0), tokens_of("/v1/audio/translations", b"x" * 8000, None, 0)
    ((10, 0), (50, 0))
    """
    output_tokens = events
    if usage is not None:
        output_tokens = usage.output_tokens or 0
        if usage.prompt_tokens is not None:
            return usage.prompt_tokens, output_tokens
    if path in _AUDIO:
        seconds = usage.audio_s if usage is not None and usage.audio_s is not None else _audio_s(body)
        return math.ceil(_AUDIO_TOKENS_PER_S * seconds), output_tokens
    return math.ceil(len(body) / BYTES_PER_TOKEN), output_tokens


def _audio_s(body: bytes) -> float:
    """Return an estimate of the seconds of audio in an upload: by the byte rate of a WAV file, else by its size."""
    match = _WAV.search(body[:_WAV_WITHIN_BYTES])
    bytes_per_s = 0 if match is None else int.from_bytes(match[0][-4:], "little")
    return len(body) / (bytes_per_s or _AUDIO_BYTES_PER_S)
