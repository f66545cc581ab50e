"""GPUs as their data sheets describe them, and precisions of weights."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources


class Precision(StrEnum):
    """Precisions of a target's weights."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"  # NVFP4, MXFP4
    INT4 = "int4"  # computed in BF16

    @property
    def bytes_per_weight(self) -> float:
        """Bytes that a weight takes in memory; for four bits, including its block's scales."""
        return {Precision.BF16: 2.0, Precision.FP8: 1.0}.get(self, 0.5625)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its data sheet describes it, without sparsity."""

    name: str
    bandwidth_tb_s: float
    tflops: dict[Precision, float]
    gib: float
    splits_context: bool  # whether vLLM's attention does in steps that verify; FlashAttention 2 does not


@cache
def gpus() -> dict[str, Gpu]:
    """Return the known GPUs by lowercase name."""
    text = resources.files("backends.calibration").joinpath("gpus.csv").read_text(encoding="utf-8")
    return {
        row["gpu"].lower(): Gpu(
            row["gpu"],
            float(row["bandwidth_tb_s"]),
            # INT4 weights are computed in BF16.
            {each: float(row[f"{'bf16' if each is Precision.INT4 else each}_tflops"]) for each in Precision},
            float(row["gib"]),
            row["splits_context"] == "1",
        )
        for row in csv.DictReader(text.splitlines())
    }
