"""SpecForge's runs of EAGLE-3 in SGLang: tokens/s and accepted length by draft length, ten targets, batch 1 or 8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from backends.speculation import Method
from benchmarks.calibration.cases import Case, Closed, Collected, Given, Group, LeftOut, Work
from benchmarks.calibration.cases import geometric_survival as geometric
from benchmarks.calibration.facts import config_of

SOURCE = "specforge"
WORK = Work("chat", prompt_tokens=150, output_tokens=400)
"""The figures come without prompts and lengths; assumed is an answer of a few hundred tokens to a short question."""


def read(path: Path) -> Collected:
    """Return the results of the file, without trees of drafts (topk above 1)."""
    collected, trees = Collected(), 0
    for model, datasets in json.loads(path.read_text(encoding="utf-8")).items():
        for dataset, entry in datasets.items():
            plain: dict[Group, Case] = {}
            for result in entry["results"]:
                heads = [head for head in result["metrics"] if head["accept_length"] > 1]
                if result["topk"] > 1:
                    trees += len(heads)
                    continue
                batch = int(result["batch_size"])
                group = Group(f"sglang/{model}", SOURCE, dataset, f"{batch}")
                load = Closed(batch, max(8, 4 * batch))
                baseline = next(metric for metric in result["metrics"] if metric["accept_length"] == 1)
                measured = {"output_tok_s": baseline["output_throughput"]}
                plain.setdefault(group, Case(group, "baseline", Method.BASELINE, {}, load, WORK, measured))
                collected.cases += [
                    _case(group, load, head, result["steps"], baseline["output_throughput"]) for head in heads
                ]
            collected.cases += plain.values()
    reason = "draft trees (topk above 1): vLLM does not support them and the simulator does not model them"
    collected.left_out.append(LeftOut("data.json", "topk > 1", trees, reason))
    return collected


def _case(group: Group, load: Closed, head: dict[str, Any], k: int, plain_tok_s: float) -> Case:
    name = head["Name"].rpartition("/")[2]
    return Case(
        group=group,
        label=f"eagle3 k={k}, {name}",
        method=Method.EAGLE3,
        config=config_of(Method.EAGLE3, k),
        load=load,
        work=WORK,
        measured={"speedup": head["output_throughput"] / plain_tok_s},
        given=Given(1.0, geometric(head["accept_length"] - 1, k), k),
    )
