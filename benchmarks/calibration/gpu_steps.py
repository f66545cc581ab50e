"""Print step times measured on a GPU over a calibration's: `python -m benchmarks.calibration.gpu_steps [NAME]`.

gpu_steps.csv has them: vLLM 0.24.0 (PyTorch 2.11, CUDA 13.0), Llama-3.1-8B's shape in bf16 with random weights
(`--load-format dummy`), engine in the measuring process, CUDA graphs and compilation on, prefix caching off, at most
8,192 tokens a step. Of each batch, all requests decode; median and quartiles of 40 steps after 6. Drafts of EAGLE-3 and
n-gram are accepted by `rejection_sample_method: synthetic`. `prompt` is the time to the first token of one request
alone. Weights of another value take the same time; that of n-gram's lookup depends on the texts.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np

from backends.calibration.batch_schedule import decode_step_s
from backends.calibration.load import load_calibration
from backends.calibration.parameters import EngineParameters
from backends.speculation import Method
from benchmarks.table import head, row

CALIBRATION = sys.argv[1] if len(sys.argv) > 1 else "llama-3.1-8b-h100"


def expected_s(row: dict[str, str]) -> float:
    """Return what the calibration gives for a row."""
    k, context = int(row["k"]), float(row["context"])
    config: dict[str, Any] = {"num_speculative_tokens": k} if k else {}
    parameters = EngineParameters.of(load_calibration(CALIBRATION), Method(row["method"]), config)
    if row["kind"] == "decode":
        return float(decode_step_s(parameters, np.array([float(row["batch"])]), k, context)[0])
    step = parameters.step
    steps = np.ceil(context / parameters.max_num_batched_tokens)
    attended = step.per_attended_s * context * context / 2
    return float(steps * (step.base_s + step.overhead_s) + step.per_token_above_knee_s * context + attended)


def main() -> None:
    """Print a row for each measurement."""
    print(head("method", "k", "batch", "context", "of", "measured, ms", "calibration, ms", "measured over that"))
    with Path(__file__).with_name("gpu_steps.csv").open(encoding="utf-8") as file:
        for step in csv.DictReader(file):
            measured_s, said_s = float(step["median_s"]), expected_s(step)
            cells = [step[key] for key in ("method", "k", "batch", "context", "kind")]
            cells += [f"{1e3 * measured_s:.2f}", f"{1e3 * said_s:.2f}", f"{measured_s / said_s:.2f}"]
            print(row(*cells))


if __name__ == "__main__":
    main()
