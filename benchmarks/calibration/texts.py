"""Real prompts and answers as token ids, for methods that draft from the text."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from backends.simulator.text import tokenizer

Pair = tuple[list[int], list[int]]

RECORDED = {"sharegpt": "sharegpt", "instructcoder": "instructcoder", "gsm8k": "gsm8k", "cnn_dailymail": "cnn"}
"""Collections of SpecDecode-Bench: name, and the word in the file name."""

PROMPTS = {
    "mtbench": ("MT-Bench(FastChat)", "Llama-3.1-8B-Instruct"),
    "mtbench-qwen3": ("MT-Bench(FastChat)", "Qwen3-32B"),
    "canitedit": ("CanItEdit", "Llama-3.1-8B-Instruct T=0"),
    "canitedit-qwen3": ("CanItEdit", "Qwen3-32B T=0"),
}
"""Collections of prompts_outputs.jsonl.gz: name, source and model. Their ids are those of the simulator's tokenizer,
which splits a text into more tokens than the target's would."""

SHAREGPT_TOKENS = 214
"""Mean answer length of the serving benchmark's ShareGPT: 427 tokens/s at 2 requests/s in the vLLM 0.19 lab."""


class Texts:
    """Collections of texts by name, read when first needed.

    Parameters
    ----------
    data
        Directory with `specdecode_bench` and `prompts`.
    """

    def __init__(self, data: Path) -> None:
        self._data = data
        self._collections: dict[str, list[Pair]] = {}

    def get(self, name: str) -> list[Pair]:
        """Return the pairs of prompt and answer of a collection.

        Raises
        ------
        KeyError
            If there is no such collection.
        """
        if name not in self._collections:
            self._collections[name] = self._read(name)
        return self._collections[name]

    def _read(self, name: str) -> list[Pair]:
        if name == "sharegpt-served":
            return _cut(self.get("sharegpt"), SHAREGPT_TOKENS)
        if name in RECORDED:
            return self._recorded(RECORDED[name])
        return self._prompts(*PROMPTS[name])

    def _recorded(self, word: str) -> list[Pair]:
        with gzip.open(self._data / "specdecode_bench" / f"combined_{word}.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        return [(row["prompt_token_ids"], row["generated_token_ids"]) for row in rows]

    def _prompts(self, source: str, model: str) -> list[Pair]:
        encode = tokenizer.load().encode
        with gzip.open(self._data / "prompts" / "prompts_outputs.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        return [
            (encode(row["prompt"]), encode(row["output"]))
            for row in rows
            if row["source"] == source and row["output_model"] == model
        ]


def _cut(pairs: list[Pair], mean_tokens: int) -> list[Pair]:
    """Cut all answers to one length, so that their mean is `mean_tokens`."""
    low, high = 1, max(len(output) for _, output in pairs)
    while low < high:
        cap = (low + high) // 2
        mean = sum(min(len(output), cap) for _, output in pairs) / len(pairs)
        low, high = (cap + 1, high) if mean < mean_tokens else (low, cap)
    return [(prompt, output[:low]) for prompt, output in pairs]
