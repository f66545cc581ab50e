"""Make the tiny models that a real vLLM serves on the CPU: PYTHONPATH=scripts python -m tiny_models [FOLDER].

A Llama of 4 layers with a vocabulary of 2,048 and a context of 2,048 tokens, a smaller draft model, and draft heads for
it (EAGLE, EAGLE-3, MTP), trained for a minute or two on the standard library's sources. Their text is poor, but it
repeats itself, so that drafts are really accepted. Made only once: a stamp in the folder records that.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

STAMP = ".made"
SEED = 20240229


def recipe() -> str:
    """Return a digest of this package; models made by another recipe are made again."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def make(folder: Path) -> None:
    """Train everything and write it to `folder`."""
    import torch
    from transformers.utils import logging

    from . import corpus, heads, language_model, tokenizer

    logging.disable_progress_bar()
    started = time.monotonic()

    def log(text: str) -> None:
        print(f"tiny models: [{time.monotonic() - started:.0f}s] {text}", flush=True)

    texts = corpus.conversations()
    bpe = tokenizer.train_tokenizer(texts)
    tokens = torch.tensor([token for text in texts for token in bpe.backend_tokenizer.encode(text).ids])
    log(f"tokenizer of {len(bpe)} tokens, {len(tokens)} training tokens")

    target, loss = language_model.train_language_model(
        language_model.llama_config(hidden=256, layers=4, heads=4), tokens, steps=500, seed=SEED
    )
    log(f"target: {loss:.2f} nats per token")
    draft, loss = language_model.train_language_model(
        language_model.llama_config(hidden=128, layers=1, heads=2), tokens, steps=400, seed=SEED
    )
    log(f"draft model: {loss:.2f} nats per token")
    for name, kind in (("eagle", heads.EagleHead), ("eagle3", heads.Eagle3Head)):
        head, loss = heads.train_head(kind, target, tokens, steps=200, seed=SEED)
        heads.save_head(head, folder / name)
        log(f"{name} head: loss {loss:.2f}")
    mtp, loss = heads.train_head(heads.MtpHead, target, tokens, steps=200, seed=SEED)
    assert isinstance(mtp, heads.MtpHead)
    heads.save_target_with_mtp(mtp, target, bpe, folder / "target_mtp")
    log(f"MTP layer: loss {loss:.2f}")
    language_model.save_language_model(target, bpe, folder / "target")
    language_model.save_language_model(draft, bpe, folder / "draft")


def main() -> None:
    """Make the models in the folder named on the command line, unless they exist."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".cache/tiny-models")
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text() == recipe():
        return
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    make(folder)
    stamp.write_text(recipe())


if __name__ == "__main__":
    main()
