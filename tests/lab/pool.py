"""Pool files of simulated replicas."""

from __future__ import annotations

_H100 = "simulate: {calibration: llama-3.1-8b-h100}"
_REPLICAS = {
    "plain": f"{{method: baseline, {_H100}}}",
    "lookup": f"{{method: ngram, {_H100}, speculative_config: {{num_speculative_tokens: 4, prompt_lookup_max: 3}}}}",
    "tree": f"{{method: suffix, {_H100}}}",
    "head": f"{{method: eagle3, {_H100}, speculative_config: {{model: head, num_speculative_tokens: 3}}}}",
}


def pool_of(policy: str, *replicas: str) -> str:
    """Return the pool file of a model with some of four replicas."""
    backends = "".join(f"      {name}: {_REPLICAS[name]}\n" for name in replicas)
    return f"models:\n  llama:\n    policy: {policy}\n    backends:\n{backends}"
