"""Rule: a draft model that does not share the target's tokenizer."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Final

from backends.speculation import Method
from gateway.advice.evidence import ModelEvidence, Vocabularies
from gateway.advice.finding import Finding, lines

_MOST_BYTES: Final = 128 * 1024 * 1024
_SHARED: Final = 0.99


def tokenizers(model: ModelEvidence) -> list[Finding]:
    """Return the draft models with another vocabulary, which draft tokens that mean something else to the target."""
    findings = []
    for backend in model.backends:
        known = backend.vocabularies
        if backend.method is not Method.DRAFT_MODEL or known is None or known.shared >= _SHARED * known.target_tokens:
            continue
        if backend.speculative_config.get("use_heterogeneous_vocab"):
            continue
        findings.append(
            Finding(
                "tokenizer",
                model.name,
                backend.name,
                "its draft model has another tokenizer than the target",
                None,
                f"{known.shared:,} of the target's {known.target_tokens:,} tokens have the same id in the draft, "
                f"which has {known.draft_tokens:,}",
                lines(model.name, backend.name, "speculative_config:", "  use_heterogeneous_vocab: true")
                + "\n# or a draft model of the target's family",
            )
        )
    return findings


@cache
def compare_vocabularies(target: str, draft: str) -> Vocabularies | None:
    """Compare the tokenizers of two models in local folders; None where one is no folder with a `tokenizer.json`."""
    first, second = _vocabulary(Path(target)), _vocabulary(Path(draft))
    if first is None or second is None:
        return None
    return Vocabularies(len(first), len(second), sum(second.get(token) == number for token, number in first.items()))


def _vocabulary(folder: Path) -> dict[str, int] | None:
    path = folder / "tokenizer.json"
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        tokens = json.loads(path.read_bytes())["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if isinstance(tokens, list):  # unigram models: pairs of token and score
        return {str(pair[0]): number for number, pair in enumerate(tokens)}
    return tokens if isinstance(tokens, dict) else None
