"""Measure the cost of replaying suffix decoding: `python -m benchmarks.suffix_replay FOLDER`.

FOLDER holds the recordings of SpecDecode-Bench (`combined_NAME.jsonl.gz`). The answers of a dataset share one cache.
For each dataset, prints the CPU time per request, interpreted and compiled, and the final size of the cache.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path

from backends.drafting import suffix_jit
from backends.drafting.suffix import SuffixCache

_DATASETS = ("gsm8k", "instructcoder", "cnn", "sharegpt")


def _cpu_s(pairs: list[tuple[list[int], list[int]]]) -> tuple[float, int]:
    """Return the CPU seconds of replaying all answers, and the final size of the cache in bytes."""
    cache, began_s = SuffixCache(), time.process_time()
    for prompt_ids, output_ids in pairs:
        cache.replay(prompt_ids, output_ids)
    return time.process_time() - began_s, cache.held_bytes


def main() -> None:
    """Print a line for each dataset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    texts = {}
    for name in _DATASETS:
        with gzip.open(folder / f"combined_{name}.jsonl.gz", "rt") as lines:
            rows = [json.loads(line) for line in lines]
        texts[name] = [(row["prompt_token_ids"], row["generated_token_ids"]) for row in rows]
    interpreted = {name: _cpu_s(pairs)[0] for name, pairs in texts.items()}
    suffix_jit.load()
    for name, pairs in texts.items():
        cpu_s, held = _cpu_s(pairs)
        tokens = sum(len(output_ids) for _, output_ids in pairs)
        print(
            f"{name}: {len(pairs)} requests, {tokens / len(pairs):.0f} output tokens each;"
            f" {interpreted[name] / len(pairs) * 1e3:.1f} ms interpreted, {cpu_s / len(pairs) * 1e3:.2f} ms compiled;"
            f" {held / tokens:.0f} bytes per token"
        )


if __name__ == "__main__":
    main()
