"""Measure how well the text features of a prompt predict: `python -m benchmarks.prompt_features FILE`.

FILE has one JSON object per line and request: `kind`, `prompt`, `output` (it is not part of the project). For each way
of measuring overlap, prints its rank correlation with the tokens per step that n-gram drafting would have gained on the
answer; and for `code_share`, how well it separates requests about code from the others.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.describe import by_compression, by_words
from policies.features.prompt import TAIL_CHARS
from policies.features.tail import code_share, overlap_of_text

_PIECE = re.compile(r"\s?\w{1,5}|\s?[^\w\s]|\s+")  # about as long as tokens
_DRAFTED = 5
_CODE = frozenset({"code_edit", "code_gen"})


def lookup_gain(prompt: Sequence[str], output: Sequence[str]) -> float:
    """Return the pieces per step if up to 5 were drafted from the first match of the last 3 or 2 pieces."""
    pieces, position, steps = [*prompt, *output], len(prompt), 0
    after: dict[tuple[str, ...], int] = {}

    def index(end: int) -> None:
        for length in (3, 2):
            if end >= length:
                after.setdefault(tuple(pieces[end - length : end]), end)

    for end in range(1, len(prompt)):
        index(end)
    while position < len(pieces):
        steps += 1
        match = after.get(tuple(pieces[position - 3 : position])) or after.get(tuple(pieces[position - 2 : position]))
        accepted = 0
        while (
            match
            and accepted < _DRAFTED
            and position + accepted < len(pieces)
            and match + accepted < position
            and pieces[match + accepted] == pieces[position + accepted]
        ):
            accepted += 1
        for end in range(position, position + accepted + 1):
            index(end)
        position += accepted + 1
    return len(output) / steps


def ranks(values: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the rank of each value; ties share their mean rank."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranked: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[where]
    return ranked


def area_under_curve(values: Sequence[float], of_kind: npt.NDArray[np.bool_]) -> float:
    """Return the probability that a random request of the kind has a higher value than one of the others."""
    count = int(of_kind.sum())
    return float((ranks(values)[of_kind].sum() - count * (count + 1) / 2) / (count * (len(of_kind) - count)))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    with gzip.open(parser.parse_args().file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    long = [row for row in rows if len(_PIECE.findall(row["output"])) >= 16]
    gains = [lookup_gain(_PIECE.findall(row["prompt"]), _PIECE.findall(row["output"])) for row in long]
    ways: dict[str, Callable[[str], float]] = {
        "runs of 16 bytes, last 1,024 (in use)": overlap_of_text,
        "three words, last 1,024 characters": lambda text: by_words(text[-TAIL_CHARS:]),
        "three words, last 4,096 characters": lambda text: by_words(text[-4096:]),
        "zlib, last 1,024 characters": lambda text: by_compression(text[-TAIL_CHARS:]) if text else 0.0,
    }
    print(f"{'overlap':40} rank correlation with the gain of n-gram drafting ({len(long)} requests)")
    for name, way in ways.items():
        correlation = np.corrcoef(ranks([way(row["prompt"]) for row in long]), ranks(gains))[0, 1]
        print(f"{name:40} {correlation:.3f}")
    of_code = np.array([row["kind"] in _CODE for row in rows])
    shares = [code_share(row["prompt"][-TAIL_CHARS:]) for row in rows]
    accuracy = float(np.mean((np.array(shares) >= 0.5) == of_code))
    print(
        f"\ncode_share: area under the curve {area_under_curve(shares, of_code):.3f}; accuracy at 0.5: {accuracy:.1%}"
    )


if __name__ == "__main__":
    main()
