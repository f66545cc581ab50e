"""Measure the cost of a decision before anything is sent: `python -m benchmarks.describe`. Microseconds, best of five.

Three tables: `describe` on bodies of several kinds and sizes; `choose` of each policy among five backends; and the ways
of measuring overlap that were tried (`python -m benchmarks.prompt_features` shows how well each predicts).
"""

from __future__ import annotations

import re
import timeit
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import orjson

from backends.backend import Backend, State
from backends.speculation import Method
from policies.features.prompt import TAIL_CHARS
from policies.features.request import Endpoint, describe
from policies.features.tail import code_share, overlap_of_text
from policies.policy import policies

_WORD = re.compile(r"\w+|[^\w\s]")
_DRAFTED = {Method.BASELINE: 0, Method.NGRAM: 5, Method.SUFFIX: 32, Method.EAGLE3: 3, Method.DRAFT_MODEL: 3}
_CODE = "def area(width: float, height: float) -> float:\n    # both in metres\n    return width * height\n\n"


def best_us(call: Callable[[], object]) -> float:
    """Return the microseconds per call, the best of five rounds."""
    rounds = max(20, int(0.02 / max(1e-7, timeit.timeit(call, number=10) / 10)))
    return min(timeit.repeat(call, number=rounds, repeat=5)) / rounds * 1e6


def prose(characters: int) -> str:
    """Return random sentences with a vocabulary of 2,000 words whose frequencies follow Zipf's law."""
    rng = Random(7)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 9))) for _ in range(2000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    text = ""
    while len(text) < characters:
        text += " ".join(rng.choices(words, weights, k=14)) + ".\n"
    return text[:characters]


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a chat request with a system prompt and one question."""
    system = {"role": "system", "content": "You are a helpful assistant."}
    return {"model": "m", "stream": True, "messages": [system, {"role": "user", "content": text}], **fields}


def bodies() -> dict[str, tuple[Endpoint, dict[str, Any]]]:
    """Return the endpoint and body of each kind of request."""
    turns = [{"role": ("user", "assistant")[turn % 2], "content": prose(300)} for turn in range(101)]
    ids = [int(number) for number in np.random.default_rng(7).zipf(1.3, 8000) % 128000]
    return {
        "chat, prose": (Endpoint.CHAT, chat(prose(1800))),
        "chat, code": (Endpoint.CHAT, chat((_CODE * 20)[:1800])),
        "chat, Chinese": (Endpoint.CHAT, chat("\u8fd9\u662f\u4e00\u4e2a\u95ee\u9898\u3002" * 85)),
        "chat, long prose": (Endpoint.CHAT, chat(prose(32000))),
        "chat, 101 turns": (Endpoint.CHAT, {"model": "m", "messages": turns}),
        "completions, 8,000 ids": (Endpoint.COMPLETIONS, {"model": "m", "prompt": ids}),
    }


def by_words(text: str) -> float:
    """Return the share of repeated three-word sequences, with a set of tuples."""
    words = text.split()
    return 1.0 - len(set(zip(words, words[1:], words[2:], strict=False))) / max(1, len(words) - 2)


def by_tokens(text: str) -> float:
    """Return the same with punctuation split off, as a tokenizer would."""
    words = _WORD.findall(text)
    return 1.0 - len(set(zip(words, words[1:], words[2:], strict=False))) / max(1, len(words) - 2)


def by_hashed_words(text: str) -> float:
    """Return the same with hashed words, sorted by numpy."""
    ids = np.fromiter(map(hash, text.split()), dtype=np.int64)
    grams = (ids[:-2] * 31 + ids[1:-1]) * 37 + ids[2:]
    return 1.0 - len(np.unique(grams)) / max(1, len(grams))


def by_compression(text: str) -> float:
    """Return the share of bytes that zlib saves at its fastest level."""
    raw = text.encode()
    return 1.0 - len(zlib.compress(raw, 1)) / len(raw)


def main() -> None:
    """Print the three tables."""
    print(f"{'describe':26} {'bytes':>7} {'us':>7}")
    for name, (endpoint, body) in bodies().items():
        cost = best_us(
            lambda e=endpoint, b=body: describe(e, b, model="m", default_temperature=1.0, qps=1.0, in_flight=1)  # type: ignore[misc]
        )
        print(f"{name:26} {len(orjson.dumps(body)):7} {cost:7.1f}")

    methods = (Method.BASELINE, Method.NGRAM, Method.SUFFIX, Method.EAGLE3, Method.DRAFT_MODEL)
    pool = [
        Backend(str(method), "m", method, "http://127.0.0.1:1", _DRAFTED[method], state=State.UP) for method in methods
    ]
    request = describe(Endpoint.CHAT, chat(prose(1800)), model="m", default_temperature=0.0, qps=1.0, in_flight=1)
    print(f"\n{'choose among five':34} {'us':>7}")
    for name, policy in policies().items():
        settings = policy.Settings(method="ngram") if name == "static" else policy.Settings()  # type: ignore[call-arg]
        built = policy(settings)
        print(f"{name:34} {best_us(lambda b=built: b.choose(request, pool)):7.1f}")  # type: ignore[misc]

    ways: dict[str, Callable[[str], float]] = {
        "overlap: runs of bytes (in use)": overlap_of_text,
        "overlap: three words": by_words,
        "overlap: words and punctuation": by_tokens,
        "overlap: hashed words (numpy)": by_hashed_words,
        "overlap: zlib": by_compression,
        "code_share (in use)": code_share,
    }
    print(f"\n{'features of a text, us':34} {'500':>7} {TAIL_CHARS:>7} {'4096':>7}")
    for name, way in ways.items():
        costs = (best_us(lambda w=way, n=size: w(TEXTS[n])) for size in (500, TAIL_CHARS, 4096))  # type: ignore[misc]
        print(f"{name:34}", *(f"{cost:7.1f}" for cost in costs))


TEXTS = {size: prose(size) for size in (500, TAIL_CHARS, 4096)}

if __name__ == "__main__":
    main()
