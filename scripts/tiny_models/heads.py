"""EAGLE, EAGLE-3 and MTP heads: one decoder layer that drafts from the target's own hidden states.

Both see, at each position, the embedding of a token and a hidden state of the position before it, and predict the
token after. EAGLE (arXiv:2401.15077) reads the target's last hidden state; EAGLE-3 (arXiv:2503.01840) a
projection of three layers' states. While drafting, a head reads its own output in place of the target's, so each is
trained on that as well (`DRAFT_STEPS` of them).
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from .language_model import fit, silence, windows

DRAFT_STEPS = 2


class Head(nn.Module, ABC):
    """A draft head for one target, whose embeddings it uses and which it does not change."""

    architecture: str

    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__()
        self.config = LlamaConfig(
            **{**target.config.to_dict(), "num_hidden_layers": 1, "architectures": [self.architecture]}
        )
        self.config._attn_implementation = "sdpa"
        # Lambdas, because a module set as an attribute would be trained and saved with this head.
        self.embed = lambda ids: target.model.embed_tokens(ids)  # noqa: PLW0108
        self.logits_of_target = lambda hidden: target.lm_head(hidden)  # noqa: PLW0108
        self.rotary = LlamaRotaryEmbedding(self.config)

    @abstractmethod
    def read(self, hidden_states: tuple[Tensor, ...], last: Tensor) -> Tensor:
        """Return the input of the first draft step, from the target: (batch, tokens, hidden)."""

    @abstractmethod
    def draft(self, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits, input of the next draft step)."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return the weights with the names of published heads."""

    def extra_config(self) -> dict[str, Any]:
        """Return the entries of the configuration that a Llama does not have."""
        return {}

    def rotations(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary embedding's (cos, sin) for positions 0, 1, ... of `states`."""
        cos, sin = self.rotary(states, torch.arange(states.shape[1])[None])
        return cos, sin


class EagleHead(Head):
    """EAGLE: outputs a hidden state like the target's, for the target's own language-model head."""

    architecture = "LlamaForCausalLM"

    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__(target)
        self.fc = nn.Linear(2 * self.config.hidden_size, self.config.hidden_size, bias=False)
        self.layer = LlamaDecoderLayer(self.config, layer_idx=0)
        silence(self.layer)
        self.layer.register_module("input_layernorm", nn.Identity())  # vLLM has none in the first layer of such a head

    def read(self, hidden_states: tuple[Tensor, ...], last: Tensor) -> Tensor:
        """See `Head.read`."""
        return last

    def draft(self, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """See `Head.draft`."""
        states = self.fc(torch.cat([embeddings, features], dim=-1))
        states = self.layer(states, position_embeddings=self.rotations(states))
        return self.logits_of_target(states), states

    def weights(self) -> dict[str, Tensor]:
        """See `Head.weights`."""
        return {name.replace("layer.", "layers.0.", 1): weight for name, weight in self.state_dict().items()}


class Eagle3Head(Head):
    """EAGLE-3: reads three layers of the target, attends over token and features together, has its own output layer."""

    architecture = "LlamaForCausalLMEagle3"
    layer_ids = (1, 2, 3)

    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__(target)
        hidden = self.config.hidden_size
        self.fc = nn.Linear(len(self.layer_ids) * hidden, hidden, bias=False)
        self.midlayer = LlamaDecoderLayer(self.config, layer_idx=0)
        silence(self.midlayer)
        attention = self.midlayer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(attention, name, nn.Linear(2 * hidden, getattr(attention, name).out_features, bias=False))
        self.midlayer.add_module("hidden_norm", LlamaRMSNorm(hidden, eps=self.config.rms_norm_eps))
        self.norm = LlamaRMSNorm(hidden, eps=self.config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, self.config.vocab_size, bias=False)
        self.lm_head.weight.data.copy_(target.lm_head.weight.data)

    def read(self, hidden_states: tuple[Tensor, ...], last: Tensor) -> Tensor:
        """See `Head.read`."""
        features: Tensor = self.fc(torch.cat([hidden_states[i] for i in self.layer_ids], dim=-1))
        return features

    def draft(self, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """See `Head.draft`."""
        layer = self.midlayer
        states = torch.cat([layer.input_layernorm(embeddings), layer.get_submodule("hidden_norm")(features)], dim=-1)
        attended, _ = layer.self_attn(states, position_embeddings=self.rotations(states), attention_mask=None)
        residual = features + attended
        output = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return self.lm_head(self.norm(output)), output

    def weights(self) -> dict[str, Tensor]:
        """See `Head.weights`."""
        return dict(self.state_dict())

    def extra_config(self) -> dict[str, Any]:
        """See `Head.extra_config`."""
        return {"draft_vocab_size": self.config.vocab_size, "eagle_aux_hidden_state_layer_ids": list(self.layer_ids)}


class MtpHead(Head):
    """Multi-token prediction as MiMo has it: one further decoder layer, shipped in the target's own checkpoint.

    It reads the target's last hidden state beside the next token's embedding, each normalised, and shares the
    target's output layer (`vllm/model_executor/models/mimo_mtp.py`).
    """

    architecture = "MiMoForCausalLM"

    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__(target)
        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.token_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.hidden_layernorm = LlamaRMSNorm(hidden, eps=eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.mtp_block = LlamaDecoderLayer(self.config, layer_idx=0)
        silence(self.mtp_block)
        self.final_layernorm = LlamaRMSNorm(hidden, eps=eps)

    def read(self, hidden_states: tuple[Tensor, ...], last: Tensor) -> Tensor:
        """See `Head.read`."""
        return last

    def draft(self, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """See `Head.draft`."""
        states = torch.cat([self.hidden_layernorm(features), self.token_layernorm(embeddings)], dim=-1)
        states = self.input_proj(states)
        states = self.final_layernorm(self.mtp_block(states, position_embeddings=self.rotations(states)))
        return self.logits_of_target(states), states

    def weights(self) -> dict[str, Tensor]:
        """See `Head.weights`."""
        return {
            f"model.mtp_layers.0.{name.replace('mtp_block.', '')}": each for name, each in self.state_dict().items()
        }


def train_head(kind: type[Head], target: LlamaForCausalLM, tokens: Tensor, steps: int, seed: int) -> tuple[Head, float]:
    """Train a head to match the target's distribution; return it and its loss, nats per token over `DRAFT_STEPS`."""
    torch.manual_seed(seed)
    target.requires_grad_(False)
    head = kind(target)

    def loss_of(batch: Tensor) -> Tensor:
        with torch.no_grad():
            run = target.model(input_ids=batch, output_hidden_states=True)
            expected = target.lm_head(run.last_hidden_state).softmax(-1)
        embeddings = head.embed(batch)
        features = head.read(run.hidden_states, run.last_hidden_state)
        total = torch.zeros(())
        for ahead in range(1, DRAFT_STEPS + 1):
            # Position i reads the embedding of token i+1 and the features of i, and predicts the token after i+1; its
            # output then serves as the features of i+1.
            logits, outputs = head.draft(embeddings[:, ahead:], features[:, :-1])
            total = total + nn.functional.cross_entropy(logits.flatten(0, 1), expected[:, ahead:].flatten(0, 1))
            if isinstance(head, EagleHead):
                total = total + nn.functional.smooth_l1_loss(outputs, run.last_hidden_state[:, ahead:])
            features = outputs
        return total / DRAFT_STEPS

    loss = fit(head, windows(tokens, steps, seed), steps, loss_of, peak_rate=2e-3)
    return head, loss


def save_head(head: Head, folder: Path) -> None:
    """Write the head in bfloat16 to `folder`, in vLLM's format."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in head.weights().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = head.config.to_dict() | {"dtype": "bfloat16"} | head.extra_config()
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))


def save_target_with_mtp(
    head: MtpHead, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write the target once more, as a MiMo with the MTP layer in its checkpoint.

    MiMo's layers are Qwen2's: those of a Llama with biases on queries, keys and values, which are zero here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {**target.state_dict(), **head.weights()}
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        weights[name.replace("weight", "bias")] = torch.zeros(len(weights[name]))
    saved = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    llama_only = ("attention_bias", "mlp_bias", "head_dim", "pretraining_tp")
    config = {name: value for name, value in target.config.to_dict().items() if name not in llama_only}
    config |= {"architectures": [head.architecture], "model_type": "qwen2", "dtype": "bfloat16"}
    config |= {
        "num_nextn_predict_layers": 1,
        "use_sliding_window": False,
        "max_window_layers": config["num_hidden_layers"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))
    target.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
