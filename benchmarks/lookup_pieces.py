"""Compare drafting on pieces of text with drafting on tokens: `python -m benchmarks.lookup_pieces FILE --tekken T`.

FILE has one JSON object per line with `prompt`, `output` and `kind` (gzipped or not); answers that no model wrote
(`output_model` says "reference") and those under 40 characters are left out. T is a vocabulary of mistral_common
(`tekken_240911.json`, 131,072 tokens), which must be installed, so run this with the Python of a vLLM. For each n-gram
or suffix arm, prints the tokens per step on pieces over those on tokens as a geometric
mean, its standard deviation in logarithms between requests, that of the tokens per step themselves, and the rank
correlation of the two.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.speculation import Method
from policies.learned.shadow_drafting import ShadowArm, piece_ids, replayed

ARMS = (
    ShadowArm("suffix", Method.SUFFIX, 24),
    ShadowArm("n-gram k=5, 3 to 7", Method.NGRAM, 5, {"prompt_lookup_min": 3, "prompt_lookup_max": 7}),
    ShadowArm("n-gram k=5, 2 to 4", Method.NGRAM, 5, {"prompt_lookup_min": 2, "prompt_lookup_max": 4}),
    ShadowArm("n-gram k=3, 5", Method.NGRAM, 3, {"prompt_lookup_min": 5, "prompt_lookup_max": 5}),
)


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the answers written by models."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if "reference" not in row.get("output_model", "") and len(row["output"]) >= 40:
                yield row


def ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return each value's rank; ties share their mean rank."""
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - count / 2)[inverse]


def main() -> None:
    """Replay every text on tokens and on pieces, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tekken", type=Path, required=True)
    arguments = parser.parse_args()
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer  # type: ignore[import-not-found, unused-ignore]

    tokenizer = Tekkenizer.from_file(str(arguments.tekken))
    on_tokens, on_pieces, kinds, tokens, pieces = [], [], [], 0, 0
    for row in rows(arguments.file):
        prompt, output = (tokenizer.encode(row[part], bos=False, eos=False) for part in ("prompt", "output"))
        split = piece_ids(row["prompt"], row["output"])
        tokens += len(output)
        pieces += len(split[1])
        on_tokens.append(replayed(prompt, output, ARMS))
        on_pieces.append(replayed(*split, ARMS))
        kinds.append(row["kind"])
    print(f"{len(kinds)} answers, {pieces / tokens:.3f} pieces per token")
    print("| arm | pieces over tokens | its spread | spread of tokens per step | rank correlation | by kind |")
    print("|---|---|---|---|---|---|")
    for arm in (shadow.arm for shadow in ARMS):
        true = np.log([gains[arm] for gains in on_tokens])
        ratio = np.log([gains[arm] for gains in on_pieces]) - true
        correlation = np.corrcoef(ranks(true), ranks(true + ratio))[0, 1]
        of_kind = {kind: ratio[[each == kind for each in kinds]].mean() for kind in sorted(set(kinds))}
        by_kind = ", ".join(f"{kind} {math.exp(mean):.2f}" for kind, mean in of_kind.items())
        figures = f"{math.exp(ratio.mean()):.3f} | {ratio.std():.3f} | {true.std():.3f} | {correlation:.3f}"
        print(f"| {arm} | {figures} | {by_kind} |")


if __name__ == "__main__":
    main()
