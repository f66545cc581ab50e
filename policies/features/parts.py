"""Parts of a prompt whose tokens its text does not show: images, audio, files, stored conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from policies.features.values import LARGEST

STORED: Final = "conversation"
"""A part of a prompt that is stored at an engine, and may have any length."""

_KINDS: Final = ("embeds", "image", "audio", "video", "file", "document")
_SAID: Final = frozenset(
    {"low", "high", "original", "png", "jpeg", "jpg", "webp", "gif", "wav", "mp3", "mpeg", "flac", "ogg", "mp4", "pdf"}
)
"""Words about a part that affect its tokens per byte: the detail of an image, a format."""
_TELLING: Final = frozenset({"detail", "format", "media_type"})
_LEAST_DATA_CHARS: Final = 64
"""Least length of a text that is data, not the id of a file."""
_DEEPEST: Final = 3
_MOST_FIELDS: Final = 32

_TYPICAL_TOKENS: Final = 1000
"""Assumed tokens of a part until engines report more: an image has from 64 to 16,000."""
_TEXT_ERROR: Final = 0.25
"""Relative error of the estimate for a text: a smaller rest of the prompt says little about its parts."""
_MOST_CLIENTS: Final = 128
_MOST_PARTS: Final = 128
"""Most kinds of parts remembered per client."""
_LEAST_CLIENTS: Final = 2
_MOST_COUNT: Final = 20
_MIXED_RATE: Final = 0.5
"""Learning rate from a prompt with several kinds of parts, which says little about each."""
_DECAY: Final = 0.05
"""Decay of the largest part, with each smaller one."""


StoredTokens = Callable[[str], int]
"""Returns the tokens of a stored response or conversation; 0 if unknown."""


@dataclass(slots=True, unsafe_hash=True)
class Unseen:
    """The parts of a prompt that its text does not show.

    Parameters
    ----------
    parts
        Number of parts of each kind.
    text_tokens
        Tokens of the rest of the prompt.
    most_tokens
        Most tokens that the whole prompt may have, by engines' reports on such parts; the largest number if any kind is
        unknown.
    unknown
        Kinds of parts on which engines have reported nothing.
    """

    parts: tuple[tuple[str, int], ...]
    text_tokens: int
    most_tokens: int = LARGEST
    unknown: tuple[str, ...] = ()


def name_of_part(part: Mapping[str, Any]) -> str:
    """Return a name for parts with similar tokens: the kind, words about it, and the size as a power of two.

    Examples
    --------
    >>> name_of_part({"type": "image_url", "image_url": {"url": "https://example.com/a.png", "detail": "low"}})
    'image low'
    >>> name_of_part({"type": "input_audio", "input_audio": {"data": "x" * 30_000, "format": "wav"}})
    'audio wav 2^15'
    """
    said = part.get("type")
    words = said if isinstance(said, str) and said else " ".join(islice(part, _MOST_FIELDS))
    names = [next((kind for kind in _KINDS if kind in words[:_LEAST_DATA_CHARS]), "other")]
    size = 0
    for key, text in _texts(part, _DEEPEST):
        if key in _TELLING:
            names += _SAID & {text.lower().rpartition("/")[2]}
        elif text.startswith("data:"):
            names += _SAID & {text[:_LEAST_DATA_CHARS].partition(";")[0].rpartition("/")[2]}
            size = max(size, len(text))
        elif len(text) >= _LEAST_DATA_CHARS and "://" not in text[:_LEAST_DATA_CHARS]:
            size = max(size, len(text))
    return sized(" ".join(names), size)


def sized(name: str, size: int) -> str:
    """Return the name of parts with their size as a power of two; without it if unknown."""
    return f"{name} 2^{size.bit_length()}" if size else name


def _texts(part: Mapping[str, Any], deepest: int) -> Iterator[tuple[str, str]]:
    for key, value in islice(part.items(), _MOST_FIELDS):
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, dict) and deepest:
            yield from _texts(value, deepest - 1)


@dataclass(slots=True)
class _Seen:
    """Tokens of one kind of part: of the usual one, and of the largest recent one."""

    mean: float
    most: float
    count: int = 1

    @property
    def bound(self) -> float:
        """Most tokens of such a part; larger if few were seen."""
        return self.most * (1.0 + 1.0 / self.count)


class PartTokens:
    """The tokens that a model's engines make of parts of prompts, learned from reported usage.

    A client's own parts predict its next ones. For a kind that it has not sent, all others' are used, if there are two
    or more: each counts equally in the expectation, and none can lower the maximum.

    Examples
    --------
    >>> tokens, parts = PartTokens(), {"image": 3}
    >>> tokens.unseen(parts, 20, "key")
    (3020, Unseen(parts=(('image', 3),), text_tokens=20, most_tokens=2147483647, unknown=('image',)))
    >>> tokens.learn(tokens.unseen(parts, 20, "key")[1], "key", 3620)
    >>> tokens.unseen(parts, 20, "key")
    (3620, Unseen(parts=(('image', 3),), text_tokens=20, most_tokens=7220, unknown=()))
    """

    def __init__(self) -> None:
        self._of: dict[str, dict[str, _Seen]] = {}  # by client and part; last seen comes last

    def unseen(self, parts: Mapping[str, int], text_tokens: int, client: str) -> tuple[int, Unseen]:
        """Return the expected tokens of a prompt, and what is known about its parts."""
        own, unknown = self._of.get(client, {}), dict[str, None]()
        tokens = most = float(text_tokens)
        for name, count in parts.items():
            seen = own.get(name) or self._seen_of_others(name)
            tokens += count * (_TYPICAL_TOKENS if seen is None else seen.mean)
            if seen is None:
                unknown[name.partition(" ")[0]] = None
            else:
                most += count * seen.bound
        most_tokens = LARGEST if unknown else round(most)
        return round(tokens), Unseen((*parts.items(),), text_tokens, most_tokens, (*unknown,))

    def learn(self, unseen: Unseen, client: str, prompt_tokens: int) -> None:
        """Learn from an engine's count of the tokens of a prompt."""
        if STORED in unseen.unknown:
            return
        left, may_be_text = float(prompt_tokens - unseen.text_tokens), _TEXT_ERROR * unseen.text_tokens
        own = self._of[client] = self._of.pop(client, {})
        if len(self._of) > _MOST_CLIENTS:
            del self._of[next(iter(self._of))]
        new = sum(count for name, count in unseen.parts if name not in own)
        if left < may_be_text:
            if not new:
                return
            left = max(0.0, left) + may_be_text
        error = left - sum(count * own[name].mean for name, count in unseen.parts if name in own)
        short = left - sum(count * own[name].most for name, count in unseen.parts if name in own)
        squares = sum(count * count for _, count in unseen.parts)
        for name, count in unseen.parts:
            seen = own.pop(name, None)
            if seen is None:
                seen = _Seen(max(0.0, error / new), left / count)
            elif not new:
                seen.count = min(_MOST_COUNT, seen.count + 1)
                rate = 1.0 / seen.count if len(unseen.parts) == 1 else _MIXED_RATE
                seen.mean = max(0.0, seen.mean + rate * error * count / squares)
                grown = short * count / squares if short > 0.0 else _DECAY * (seen.mean - seen.most)
                seen.most = max(seen.mean, seen.most + grown)
            own[name] = seen
        while len(own) > _MOST_PARTS:
            del own[next(iter(own))]

    def _seen_of_others(self, name: str) -> _Seen | None:
        found = [seen for own in self._of.values() if (seen := own.get(name)) is not None]
        if len(found) < _LEAST_CLIENTS:
            return None
        mean = sum(seen.mean for seen in found) / len(found)
        return _Seen(mean, max(seen.bound for seen in found), _MOST_COUNT)
