"""Fit the acceptance of n-gram and suffix drafting without texts: `python -m benchmarks.lookup_acceptance FOLDER`.

FOLDER holds the recordings of SpecDecode-Bench (`combined_*.jsonl.gz`), which are not part of the project. The real
proposers are replayed on every second text, with one suffix cache per dataset; the model is compared with the other
half. Prints the YAML of `backends/calibration/lookup_shares.yaml`, and the comparison on stderr.
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

from backends.drafting.ngram import ngram_replay
from backends.drafting.script import Steps
from backends.drafting.suffix import SuffixCache

Floats = npt.NDArray[np.float64]

KINDS = {"chat": "sharegpt", "code": "instructcoder", "math": "gsm8k", "summarization": "cnn"}
BOUNDS = ((2, 4), (4, 4), (5, 5))
KS = (3, 5, 10)
DEPTH = 24  # depth of the suffix trees, vLLM's default
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(41)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


@dataclass(frozen=True, slots=True)
class Shares:
    """Share of each request's steps that draft and that accept at least 1, 2, ..., k tokens, shape (requests, k)."""

    drafted: Floats
    accepted: Floats
    steps: Floats

    @property
    def tokens_per_step(self) -> Floats:
        tokens: Floats = 1 + self.accepted.sum(axis=1)
        return tokens

    @property
    def weights(self) -> Floats:
        """Share of all output tokens. Long answers repeat themselves more, and make up most of the work."""
        tokens = self.tokens_per_step * self.steps
        weights: Floats = tokens / tokens.sum()
        return weights


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted shares of a median request, and the spread of the logits between requests."""

    drafted: Floats
    accepted: Floats
    spread: float

    def tokens_per_step(self) -> tuple[float, float]:
        """Return the mean over requests, and its standard deviation for infinitely long requests."""
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
    """Return the shares of the steps that a request really takes, with drafts cut to k, and their number."""
    emitted, drafted = steps
    position, drafts, accepts = 1, [], []
    while position < len(emitted):
        drafts.append(min(drafted[position], k))
        tokens = min(int(emitted[position]), drafts[-1] + 1)
        accepts.append(tokens - 1)
        position += tokens
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
    """Match the mean shares by position, and the spread of tokens per step less the noise of short requests."""
    reach = np.arange(1, seen.accepted.shape[1] + 1)
    square = ((2 * reach - 1) * seen.accepted).sum(axis=1)  # E[accepted^2] = sum over j of (2j - 1) P(accepted >= j)
    noise = seen.weights @ ((square - seen.accepted.sum(axis=1) ** 2) / seen.steps)
    target = np.sqrt(max(0.0, _std(seen.tokens_per_step, seen.weights) ** 2 - noise))
    low, high = 0.0, 4.0
    for _ in range(20):
        spread = (low + high) / 2
        low, high = (low, spread) if _of_spread(seen, spread).tokens_per_step()[1] > target else (spread, high)
    return _of_spread(seen, spread)


def _of_spread(seen: Shares, spread: float) -> Fit:
    return Fit(_centred(seen.weights @ seen.drafted, spread), _centred(seen.weights @ seen.accepted, spread), spread)


def _centred(means: Floats, spread: float) -> Floats:
    """Return the rates of a median request for which the means over requests are `means`."""
    low, high = np.full(len(means), 1e-6), np.full(len(means), 1 - 1e-6)
    for _ in range(40):
        middle = (low + high) / 2
        above = WEIGHTS @ _shifted(middle, spread) > means
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return np.minimum.accumulate(middle)


def _std(values: Floats, weights: Floats) -> float:
    return float(np.sqrt(weights @ (values - weights @ values) ** 2))


def report(name: str, fitted: Fit, measured: Shares) -> None:
    """Print tokens per step, measured and simulated, for texts that the fit has not seen."""
    rng = np.random.default_rng(0)
    odds = np.exp(fitted.spread * rng.standard_normal((50, len(measured.steps), 1)))
    rates = fitted.accepted * odds / (1 - fitted.accepted + fitted.accepted * odds)
    steps = measured.steps.astype(int)
    accepted = [[(rng.random((n, 1)) < row).sum() / n for n, row in zip(steps, rows, strict=True)] for rows in rates]
    model = 1 + np.array(accepted)
    figures = {
        "of requests": (measured.tokens_per_step @ measured.weights, (model @ measured.weights).mean()),
        "their spread": (
            _std(measured.tokens_per_step, measured.weights),
            np.mean([_std(row, measured.weights) for row in model]),
        ),
        "over all steps": (
            1 / (measured.weights @ (1 / measured.tokens_per_step)),
            1 / ((1 / (1 + rates.sum(axis=2))) @ measured.weights).mean(),
        ),
    }
    print(f"{name}: {', '.join(f'{what} {a:.2f} / {b:.2f}' for what, (a, b) in figures.items())}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    known = {kind: list(texts(folder, dataset)) for kind, dataset in KINDS.items()}
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
    """Fit on every second request, print the fit, and compare it with the other requests."""
    fitted = fit(shares(played[::2], k))
    print(f"    {kind}: {{request_spread: {fitted.spread:.2f},")
    print(f"      drafted: [{_listed(fitted.drafted)}],\n      accepted: [{_listed(fitted.accepted)}]}},")
    report(name, fitted, shares(played[1::2], k))


def _listed(rates: Floats) -> str:
    """Return the rates as text, cut after the first that rounds to zero."""
    positive = [f"{rate:.4f}" for rate in rates if rate > 5e-5]
    return ", ".join([*positive, "0"] if len(positive) < len(rates) else positive)


if __name__ == "__main__":
    main()
