"""Measure the cost of replaying suffix decoding: `python -m benchmarks.suffix_replay FOLDER`.

FOLDER holds the recordings of SpecDecode-Bench (`combined_NAME.jsonl.gz`). The answers of a dataset share one cache.
For each dataset, prints the CPU time per request, interpreted and in C if that is built, and the memory of the latter.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import time
from pathlib import Path

import numpy as np

from backends.drafting.script import plain_steps
from backends.drafting.suffix_trees import SuffixTrees as Interpreted

_DATASETS = ("gsm8k", "instructcoder", "cnn", "sharegpt")
_DEFAULTS = (24, 1.0, 0.1, 10_000, 24, 1 << 30)  # those of vLLM


def _cost(form: type[Interpreted], pairs: list[tuple[list[int], list[int]]]) -> tuple[float, int]:
    """Return the CPU seconds of replaying all answers, and the final size of the cache in bytes; 0 if not known."""
    trees, began_s = form(*_DEFAULTS), time.process_time()
    for prompt, output in pairs:
        trees.replay(np.array(prompt + output, np.int32), len(prompt), True, *plain_steps(len(output)))
    return time.process_time() - began_s, getattr(trees, "held_bytes", 0)


def main() -> None:
    """Print a line for each dataset, and the mean of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    forms = {"interpreted": Interpreted}
    with contextlib.suppress(ImportError):
        from backends.drafting._suffix import SuffixTrees  # exists in a compiled build

        forms["in C"] = SuffixTrees
    requests, totals = 0, dict.fromkeys(forms, 0.0)
    for name in _DATASETS:
        with gzip.open(folder / f"combined_{name}.jsonl.gz", "rt") as lines:
            rows = [json.loads(line) for line in lines]
        pairs = [(row["prompt_token_ids"], row["generated_token_ids"]) for row in rows]
        tokens = sum(len(output_ids) for _, output_ids in pairs)
        line = f"{name}: {len(pairs)} requests, {tokens / len(pairs):.0f} output tokens each"
        for name_of_form, form in forms.items():
            cpu_s, held = min(_cost(form, pairs) for _ in range(3))
            totals[name_of_form] += cpu_s
            line += f"; {cpu_s / len(pairs) * 1e3:.2f} ms {name_of_form}"
            line += f", {held / tokens:.0f} bytes per token" if held else ""
        requests += len(pairs)
        print(line)
    print("all:", "; ".join(f"{cpu_s / requests * 1e3:.2f} ms {form}" for form, cpu_s in totals.items()))


if __name__ == "__main__":
    main()
