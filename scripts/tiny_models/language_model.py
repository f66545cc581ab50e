"""Training of small Llamas from scratch: the target and the draft model."""

# mypy: allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .tokenizer import CONTEXT_TOKENS, END_ID, PAD_ID, VOCABULARY

WINDOW_TOKENS = 256
BATCH = 2  # small batches allow many steps in a short time


def llama_config(hidden: int, layers: int, heads: int) -> LlamaConfig:
    """Return the configuration of a Llama with `hidden` units, heads of 64 and two query heads to a key head."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )


def windows(tokens: Tensor, steps: int, seed: int) -> Iterator[Tensor]:
    """Yield `steps` batches (BATCH, WINDOW_TOKENS) of token ids, each row from a random position of `tokens`."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - WINDOW_TOKENS, (BATCH,), generator=generator)
        yield torch.stack([tokens[start : start + WINDOW_TOKENS] for start in starts.tolist()])


def fit(
    module: nn.Module, batches: Iterator[Tensor], steps: int, loss_of: Callable[[Tensor], Tensor], peak_rate: float
) -> float:
    """Fit `module` with AdamW, warm-up and cosine decay; return the mean loss of the last tenth of the steps."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=peak_rate, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * step / steps))),
    )
    losses: list[float] = []
    for batch in batches:
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def silence(layer: nn.Module) -> None:
    """Initialise a decoder layer as the identity, so that its contribution starts at zero."""
    for name, weight in layer.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)


def train_language_model(config: LlamaConfig, tokens: Tensor, steps: int, seed: int) -> tuple[LlamaForCausalLM, float]:
    """Train a Llama to predict `tokens`; return it and its loss in nats per token."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    nn.init.normal_(model.model.embed_tokens.weight, std=0.5)  # with a smaller scale the model learns little
    for layer in model.model.layers:
        silence(layer)

    def loss_of(batch: Tensor) -> Tensor:
        logits = model(input_ids=batch[:, :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    loss = fit(model, windows(tokens, steps, seed), steps, loss_of, peak_rate=3e-3)
    return model.eval(), loss


def save_language_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model in bfloat16 and its tokenizer to `folder`, in vLLM's format."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
