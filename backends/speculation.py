"""The ways of speculating, and their `--speculative-config`, checked before anything starts."""

from __future__ import annotations

from enum import StrEnum


class Method(StrEnum):
    """How a replica speculates; vLLM's own names, and `baseline` for not at all."""

    BASELINE = "baseline"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    DRAFT_MODEL = "draft_model"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"
    MEDUSA = "medusa"
    MLP_SPECULATOR = "mlp_speculator"
    DFLASH = "dflash"
    DSPARK = "dspark"
    CUSTOM_CLASS = "custom_class"
