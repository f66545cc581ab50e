"""Fit what lookups give, for requests without a text: `python -m benchmarks.lookup_acceptance FOLDER`.

FOLDER holds the recordings of SpecDecode-Bench (`combined_*.jsonl.gz`), which are not part of the project. The real
proposers are replayed on every second text, a shared suffix cache for each dataset; the other half is what the model is
compared with. Prints the YAML of `backends/calibration/lookup_shares.yaml`, and the comparison to the standard error.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from backends.drafting import suffix_jit
from backends.drafting.ngram import ngram_replay
from backends.drafting.script import Steps
from backends.drafting.suffix import SuffixCache

Floats = npt.NDArray[np.float64]

KINDS = {"chat": "sharegpt", "code": "instructcoder", "math": "gsm8k", "summarization": "cnn"}
BOUNDS = ((2, 4), (4, 4), (5, 5))
KS = (3, 5, 10)
DEPTH = 24  # of the suffix trees, vLLM's default
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(41)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


@dataclass(frozen=True, slots=True)
class Shares:
    """Per request, shape (requests, k): the share of its steps that draft, and that accept, at least 1, 2, ..., k."""

    drafted: Floats
    accepted: Floats
    steps: Floats

    @property
    def tokens_per_step(self) -> Floats:
        return 1 + self.accepted.sum(axis=1)

    @property
    def weights(self) -> Floats:
        """Share of all tokens. Long answers repeat themselves more, and most of the work is theirs."""
        tokens = self.tokens_per_step * self.steps
        return tokens / tokens.sum()


@dataclass(frozen=True, slots=True)
class Fit:
    drafted: Floats
    accepted: Floats
    spread: float

    def tokens_per_step(self) -> tuple[float, float]:
        """Return the mean over requests, and its standard deviation for requests of endless length."""
        means = 1 + _shifted(self.accepted, self.spread).sum(axis=1)
        mean = float(WEIGHTS @ means)
        return mean, float(np.sqrt(WEIGHTS @ (means - mean) ** 2))


def _shifted(rates: Floats, spread: float) -> Floats:
    """Return the rates of requests at each node of the quadrature, shape (nodes, rates)."""
    odds = rates / (1 - rates) * np.exp(spread * NODES[:, None])
    return odds / (1 + odds)


def texts(folder: Path, dataset: str) -> Iterator[tuple[list[int], list[int]]]:
    with gzip.open(folder / f"combined_{dataset}.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if len(row["generated_token_ids"]) > 16:
                yield row["prompt_token_ids"], row["generated_token_ids"]


def walked(steps: Steps, k: int) -> tuple[Floats, Floats, int]:
    """Return the shares of one request's steps, those that decoding really begins, with drafts cut to k."""
    emitted, drafted = steps
    at, drafts, accepts = 1, [], []
    while at < len(emitted):
        drafts.append(min(drafted[at], k))
        tokens = min(int(emitted[at]), drafts[-1] + 1)
        accepts.append(tokens - 1)
        at += tokens
    reach = np.arange(1, k + 1)
    return (
        (np.array(drafts)[:, None] >= reach).mean(axis=0),
        (np.array(accepts)[:, None] >= reach).mean(axis=0),
        len(drafts),
    )


def shares(played: list[Steps], k: int) -> Shares:
    rows = [walked(steps, k) for steps in played]
    drafted, accepted, steps = (np.array(column) for column in zip(*rows, strict=True))
    return Shares(drafted, accepted, steps.astype(np.float64))


def fit(seen: Shares) -> Fit:
    """Match the means by position, and the spread of tokens per step less what short requests add to it by chance."""
    reach = np.arange(1, seen.accepted.shape[1] + 1)
    square = ((2 * reach - 1) * seen.accepted).sum(axis=1)  # E[accepted^2] = sum over j of (2j - 1) P(accepted >= j)
    chance = seen.weights @ ((square - seen.accepted.sum(axis=1) ** 2) / seen.steps)
    wanted = np.sqrt(max(0.0, _std(seen.tokens_per_step, seen.weights) ** 2 - chance))
    low, high = 0.0, 4.0
    for _ in range(20):
        spread = (low + high) / 2
        low, high = (low, spread) if _of_spread(seen, spread).tokens_per_step()[1] > wanted else (spread, high)
    return _of_spread(seen, spread)


def _of_spread(seen: Shares, spread: float) -> Fit:
    return Fit(_centred(seen.weights @ seen.drafted, spread), _centred(seen.weights @ seen.accepted, spread), spread)


def _centred(means: Floats, spread: float) -> Floats:
    """Return the rates of a request in the middle, such that the means over requests are these."""
    low, high = np.full(len(means), 1e-6), np.full(len(means), 1 - 1e-6)
    for _ in range(40):
        middle = (low + high) / 2
        above = WEIGHTS @ _shifted(middle, spread) > means
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return np.minimum.accumulate(middle)


def _std(values: Floats, weights: Floats) -> float:
    return float(np.sqrt(weights @ (values - weights @ values) ** 2))


def report(name: str, made: Fit, seen: Shares) -> None:
    """Print what the fit gives on texts it has not seen: tokens per step, measured and simulated."""
    rng = np.random.default_rng(0)
    odds = np.exp(made.spread * rng.standard_normal((50, len(seen.steps), 1)))
    rates = made.accepted * odds / (1 - made.accepted + made.accepted * odds)
    steps = seen.steps.astype(int)
    accepted = [[(rng.random((n, 1)) < row).sum() / n for n, row in zip(steps, rows, strict=True)] for rows in rates]
    model = 1 + np.array(accepted)
    figures = {
        "of requests": (seen.tokens_per_step @ seen.weights, (model @ seen.weights).mean()),
        "their spread": (_std(seen.tokens_per_step, seen.weights), np.mean([_std(row, seen.weights) for row in model])),
        "over all steps": (
            1 / (seen.weights @ (1 / seen.tokens_per_step)),
            1 / ((1 / (1 + rates.sum(axis=2))) @ seen.weights).mean(),
        ),
    }
    print(f"{name}: {', '.join(f'{what} {a:.2f} / {b:.2f}' for what, (a, b) in figures.items())}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    known = {kind: list(texts(folder, dataset)) for kind, dataset in KINDS.items()}
    suffix_jit.load()
    for low, high in BOUNDS:
        for k in KS:
            print(f"- {{method: ngram, prompt_lookup_min: {low}, prompt_lookup_max: {high}, k: {k}, by_kind: {{")
            for kind, pairs in known.items():
                played = [ngram_replay(*pair, k, low, high) for pair in pairs]
                compare(f"ngram {low}-{high} {kind} k={k}", kind, played, k)
            print("  }}")
    print(f"- {{method: suffix, k: {DEPTH}, by_kind: {{")
    for kind, pairs in known.items():
        cache = SuffixCache(DEPTH)
        compare(f"suffix {kind}", kind, [cache.replay(*pair) for pair in pairs], DEPTH)
    print("  }}")


def compare(name: str, kind: str, played: list[Steps], k: int) -> None:
    """Fit on every second request, print that, and compare it with the others."""
    made = fit(shares(played[::2], k))
    print(f"    {kind}: {{request_spread: {made.spread:.2f},")
    print(f"      drafted: [{_written(made.drafted)}],\n      accepted: [{_written(made.accepted)}]}},")
    report(name, made, shares(played[1::2], k))


def _written(rates: Floats) -> str:
    """Write rates down to the first that is none."""
    there = [f"{rate:.4f}" for rate in rates if rate > 5e-5]
    return ", ".join([*there, "0"] if len(there) < len(rates) else there)


if __name__ == "__main__":
    main()
