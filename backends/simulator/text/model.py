"""The simulated target model, which decides the text of an answer.

The text depends only on the model, the prompt, the seed and the temperature, not on how a replica speculates. Replicas
of one model thus answer greedy requests alike, and n-gram and suffix drafting find real matches: asked to repeat or
edit something, the model copies it; asked for code or an extraction, it often reuses phrases of the prompt or its own
answer; in chat it seldom does.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import pairwise
from os import urandom
from random import Random

from backends.calibration.calibration import Kind
from backends.simulator.text import language, task, tokenizer
from backends.simulator.text.language import CorpusModel
from backends.simulator.text.tokenizer import END_OF_TURN, START_OF_TURN, Tokenizer
from backends.simulator.text.words import Words

# By kind: median length in tokens, probability per token of reusing an earlier phrase, mean length of the phrase.
_STYLES: dict[Kind, tuple[int, float, float]] = {
    Kind.CHAT: (220, 0.02, 4.0),
    Kind.CODE: (300, 0.07, 9.0),
    Kind.MATH: (180, 0.06, 5.0),
    Kind.SUMMARIZATION: (110, 0.10, 7.0),
    Kind.EXTRACTION: (90, 0.25, 9.0),
    Kind.TRANSLATION: (160, 0.02, 3.0),
    Kind.REASONING: (600, 0.08, 5.0),
    Kind.RAG: (120, 0.15, 8.0),
}
_LENGTH_SPREAD = 0.5  # standard deviation of the logarithm of the length


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one choice.

    Examples
    --------
    >>> Sampling(temperature=0.0).spread
    0.0
    >>> Sampling(temperature=0.8, top_p=0.5).spread
    0.4
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None  # of the choice; None: random. Greedy requests (temperature 0) ignore it
    index: int = 0  # of the choice, if a request asks for `n`

    @property
    def spread(self) -> float:
        """Effective randomness: the temperature narrowed by nucleus sampling; 0 for greedy."""
        return self.temperature * max(self.top_p, 0.05)


@dataclass(frozen=True, slots=True)
class Writing:
    """A finished text."""

    ids: list[int]  # output tokens; if the model stopped by itself, the last one ends the turn
    kind: Kind
    stopped: bool  # whether the model stopped by itself, rather than at the limit


class TargetModel:
    """A simulated target model.

    Examples
    --------
    >>> model = load("example")
    >>> prompt = model.tokenizer.chat_prompt([{"role": "user", "content": "Repeat: to be or not to be"}])
    >>> writing = model.write(prompt, Sampling(temperature=0.0), limit=100)
    >>> writing.kind, writing.stopped, writing == model.write(prompt, Sampling(temperature=0.0), limit=100)
    (<Kind.EXTRACTION: 'extraction'>, True, True)
    """

    def __init__(self, name: str, tokens: Tokenizer, prose: CorpusModel, code: CorpusModel) -> None:
        self.name = name
        self.tokenizer = tokens
        self.prose = prose
        self.code = code
        self.words = Words(tokens)
        self.blank = frozenset(token for token in range(len(tokens)) if not tokens.string(token).strip())
        self.starts = frozenset(
            token for token in range(len(tokens)) if tokens.string(token).endswith((".", "\n\n", ":\n", ".\n"))
        )

    def write(self, prompt_ids: Sequence[int], sampling: Sampling, limit: int, least: int = 0) -> Writing:
        """Write an answer to `prompt_ids` of `least` to `limit` tokens."""
        asked = task.understand(self.tokenizer.decode(prompt_ids, special=True))
        random = self.random(prompt_ids, sampling)
        median, _, _ = _STYLES[asked.kind]
        length = max(6, min(4096, int(median * math.exp(random.gauss(0.0, _LENGTH_SPREAD)))))
        opening, closing = self.tokenizer.encode(asked.opening), self.tokenizer.encode(asked.closing)
        draft = _Draft(self, prompt_ids, asked.kind, sampling.spread, random, limit)
        draft.append(opening)
        if asked.passage:
            draft.copy(self.tokenizer.encode(asked.passage), asked.edit_rate + _slips(asked.edit_rate, sampling.spread))
        else:
            draft.write_freely(min(limit, length), continuing=asked.continues)
        draft.append(closing)
        draft.write_freely(least)
        stopped = len(draft) < limit
        if stopped:
            draft.append([END_OF_TURN])
        return Writing(draft.ids, asked.kind, stopped)

    def random(self, prompt_ids: Sequence[int], sampling: Sampling) -> Random:
        """Return the random generator of a choice; equal requests that are greedy or seeded get equal ones."""
        seed = b""
        if sampling.spread:
            seed = urandom(8) if sampling.seed is None else f"{sampling.seed}/{sampling.spread}".encode()
            seed += bytes([sampling.index % 256])
        return Random(self.digest(prompt_ids, seed))

    def digest(self, prompt_ids: Sequence[int], seed: bytes = b"") -> int:
        """Return a 64-bit number that depends on the model, a prompt and a seed."""
        hashed = blake2b(self.name.encode(), digest_size=8)
        hashed.update(array("I", prompt_ids).tobytes() + seed)
        return int.from_bytes(hashed.digest(), "big")


class _Draft:
    """A text in progress: its tokens so far, which it may reuse, and the current position in the corpus."""

    def __init__(
        self, model: TargetModel, prompt_ids: Sequence[int], kind: Kind, spread: float, random: Random, limit: int
    ) -> None:
        self.limit = limit
        self._model = model
        self._corpus = model.code if kind is Kind.CODE else model.prose
        self._random = random
        self._history = list(prompt_ids)
        self._followed = list(prompt_ids)  # the same, with the corpus's words instead of the answer's own
        self._own_words = model.words.of_answer(model.digest(prompt_ids))
        # Where each pair of tokens ends: its last occurrence in the prompt, or its first in the answer.
        self._seen = dict(zip(pairwise(prompt_ids), range(1, len(prompt_ids)), strict=True))
        self._entered = self._prompt_length = len(prompt_ids)
        _, take_up, self._mean_run = _STYLES[kind]
        # A higher temperature jumps more often, to less similar contexts, and reuses fewer earlier phrases.
        self._jump_rate = 0.06 + 0.22 * spread
        self._jump_order = 3 if spread < 0.5 else 2 if spread < 1.2 else 1
        self._take_up_rate = take_up / (1.0 + 1.5 * spread)

    @property
    def ids(self) -> list[int]:
        """The tokens written so far."""
        return self._history[self._prompt_length :]

    def __len__(self) -> int:
        return len(self._history) - self._prompt_length

    def _add(self, token: int) -> None:
        self._history.append(token)
        self._followed.append(token)

    def _last_seen(self) -> int | None:
        """Return where the last two tokens occurred before; None if they did not."""
        history, enter = self._history, self._seen.setdefault
        since = max(1, self._entered)
        for position, pair in enumerate(pairwise(history[since - 1 :]), since):
            enter(pair, position)
        self._entered = len(history)
        return self._seen.get((history[-2], history[-1]))

    def append(self, tokens: Sequence[int]) -> None:
        """Write `tokens` as they are."""
        for token in tokens[: max(0, self.limit - len(self))]:
            self._add(token)

    def copy(self, source: Sequence[int], edit_rate: float) -> None:
        """Write `source`; at each token, start a small edit with probability `edit_rate`."""
        random, position = self._random, 0
        while position < len(source) and len(self) < self.limit:
            if edit_rate and random.random() < edit_rate:
                place = self._corpus.jump(self._followed[-3:], 2, random)
                for offset in range(1 + int(random.random() * 3)):
                    if len(self) < self.limit and place + 1 + offset < len(self._corpus.ids):
                        self._add(self._corpus.ids[place + 1 + offset])
                position += int(random.random() * 4)  # tokens that the edit replaces; none for an insertion
            else:
                self._add(source[position])
                position += 1

    def write_freely(self, until: int, *, continuing: bool = False) -> None:
        """Write up to `until` tokens, about a topic of the prompt or `continuing` from its end."""
        random, corpus_ids, last = self._random, self._corpus.ids, len(self._corpus.ids) - 1
        if len(self) >= until:
            return
        if continuing:
            place = self._corpus.jump(self._followed[-3:], 3, random)
        else:
            place = self._corpus.sentence_about(self._history[-200:], self._model.starts, random)
        while not continuing and not len(self) and place < last - 1 and corpus_ids[place + 1] in self._model.blank:
            place += 1
        quiet = 0  # tokens until the next reuse of a phrase, so that the text does not loop
        history, followed, own_words = self._history, self._followed, self._own_words
        draw, stays, take_up_rate = random.random, 1.0 - self._jump_rate, self._take_up_rate
        while len(self) < until:
            roll = draw()
            if quiet <= 0 and roll < take_up_rate and len(history) > 1:
                place, quiet = self._take_up(place)
                continue
            if place >= last or roll > stays:
                place = min(self._corpus.jump(followed[-3:], self._jump_order, random), last - 1)
            place += 1
            followed.append(corpus_ids[place])
            history.append(own_words(corpus_ids[place]))
            quiet -= 1

    def _take_up(self, place: int) -> tuple[int, int]:
        """Copy a phrase from the prompt or the answer; return the new position in the corpus and a quiet period."""
        start = self._last_seen()
        if start is None or start + 1 >= len(self._history) - 1:
            if self._random.random() < 0.5 or self._prompt_length < 16:
                return place, 2
            start = int(self._random.random() * (self._prompt_length - 8))  # quotes something from the prompt
            if self._history[start] == START_OF_TURN:
                start += 2  # skips the name of the role
        run = 2 + int(self._random.expovariate(1.0 / self._mean_run))
        for token in self._history[start + 1 : start + 1 + run]:
            if len(self) >= self.limit or token <= END_OF_TURN:
                break
            self._add(token)
        return self._corpus.jump(self._followed[-3:], 2, self._random), run + 4


def _slips(edit_rate: float, spread: float) -> float:
    """Return the probability per copied token of an unrequested edit; it grows with the temperature."""
    return (0.025 if edit_rate else 0.01) * spread**2


@cache
def _corpora() -> tuple[CorpusModel, CorpusModel]:
    tokens = tokenizer.load()
    return tuple(CorpusModel(tokens.encode(text), len(tokens)) for text in (language.prose(), language.code()))  # type: ignore[return-value]


def load(name: str) -> TargetModel:
    """Return the target model called `name`. The first call reads the corpus, in about half a second."""
    prose, code = _corpora()
    return TargetModel(name, tokenizer.load(), prose, code)
