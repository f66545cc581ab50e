"""Synthetic prompts of a given length, and request bodies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

KINDS = ("random", "repeating", "copy")
"""Random words; a passage repeated; a text to copy, so that prompt and answer overlap."""

_PASSAGE_WORDS = 48
_COPY_INSTRUCTION = "Repeat the following text word for word:\n"
# Common words: in nearly every BPE vocabulary each of them, with its leading space, is one token.
_WORD_LIST = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea body information back parent face
others level office door health person art war history party result change morning reason research girl guy moment
air teacher force education foot boy age policy music process market sense nation plan college interest death
experience effect use class control field development role effort rate heart drug show leader light voice wife police
mind price report decision son view relationship town road arm difference value building action season society tax
director position player record paper space ground form event official matter center couple site project activity
star table need court american oil half situation cost industry figure street image phone data picture practice piece
land product doctor wall patient worker news test movie north love step green open move live believe hold bring happen
write provide sit stand lose pay meet include continue set learn lead understand watch follow stop create speak read
allow add spend grow walk win offer remember consider appear buy wait serve die send expect build stay fall cut reach
"""
_WORDS = _WORD_LIST.split()


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one request."""

    text: str = ""  # user message, or text to complete; empty with `messages`
    messages: Sequence[Any] | None = None  # conversation in OpenAI's format
    output_tokens: int | None = None  # limit on the answer's length; None leaves it to the engine
    token_ids: Sequence[int] = ()  # text to complete as token ids; only for completions


@dataclass(frozen=True, slots=True)
class TokenScale:
    """Number of tokens of a synthetic prompt: `fixed + per_word * words`.

    Examples
    --------
    >>> scale = TokenScale.through((10, 21), (110, 146))
    >>> scale.per_word, scale.words(271)
    (1.25, 210)
    """

    fixed: float = 0.0  # tokens of the chat template
    per_word: float = 1.0  # tokens per word
    measured: bool = False  # whether the engine's counts were used; False for the assumed default

    @classmethod
    def through(cls, small: tuple[int, int], large: tuple[int, int]) -> TokenScale:
        """Return the scale through two pairs of (words, tokens); the default if the counts do not increase."""
        words, tokens = large[0] - small[0], large[1] - small[1]
        if words <= 0 or tokens <= 0:
            return cls()
        per_word = tokens / words
        return cls(max(0.0, small[1] - per_word * small[0]), per_word, measured=True)

    def words(self, tokens: int) -> int:
        """Return the number of words whose tokens are closest to `tokens`, at least one."""
        return max(1, round((tokens - self.fixed) / self.per_word))


def random_text(random: Random, words: int) -> str:
    """Return `words` random words."""
    return " ".join(random.choices(_WORDS, k=words))


def every_word(random: Random) -> list[str]:
    """Return each word of synthetic prompts once, in random order: a text with exactly their mean tokens per word."""
    return random.sample(_WORDS, len(_WORDS))


def synthetic_text(kind: str, random: Random, words: int) -> str:
    """Return a prompt of `words` words, of one of `KINDS`; those of the `copy` instruction are included.

    Notes
    -----
    `repeating` repeats a passage of 48 words, with one word in sixteen changed each time, so that prompt lookup finds
    its last words earlier in the prompt. `copy` asks the model to repeat a text.

    Examples
    --------
    >>> len(synthetic_text("repeating", Random(0), 100).split())
    100
    """
    if kind == "repeating":
        passage = random.choices(_WORDS, k=_PASSAGE_WORDS)
        text: list[str] = []
        while len(text) < words:
            text += [random.choice(_WORDS) if random.random() < 1 / 16 else word for word in passage]
        return " ".join(text[:words])
    if kind == "copy":
        return _COPY_INSTRUCTION + random_text(random, max(1, words - len(_COPY_INSTRUCTION.split())))
    return random_text(random, words)


@dataclass(frozen=True, slots=True)
class RequestFormat:
    """Endpoint and sampling parameters of requests, with which prompts become bodies.

    Examples
    --------
    >>> request_format = RequestFormat("completions", "m", temperature=0.0)
    >>> request_format.path, orjson.loads(request_format.body(Prompt("Hello", output_tokens=8)))["max_tokens"]
    ('/v1/completions', 8)
    """

    endpoint: str  # `chat` or `completions`
    model: str
    # temperature, top_p: sampling parameters; None leaves them to the engine.
    temperature: float | None = None
    ignore_eos: bool = False  # whether answers run to their limit (vLLM)
    top_p: float | None = None

    @property
    def path(self) -> str:
        """Path of the endpoint below the base URL."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def body(self, prompt: Prompt) -> bytes:
        """Return the body of a streamed request with usage, as `vllm bench serve` sends it."""
        fields: dict[str, Any] = {"model": self.model}
        if self.endpoint == "chat":
            fields["messages"] = prompt.messages or [{"role": "user", "content": prompt.text}]
            limit = "max_completion_tokens"
        else:
            fields["prompt"] = list(prompt.token_ids) or prompt.text
            limit = "max_tokens"
        if prompt.output_tokens is not None:
            fields[limit] = prompt.output_tokens
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if self.top_p is not None:
            fields["top_p"] = self.top_p
        if self.ignore_eos:
            fields["ignore_eos"] = True
        fields["stream"] = True
        fields["stream_options"] = {"include_usage": True}
        return orjson.dumps(fields)
