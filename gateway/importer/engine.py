"""vLLM's command line: how an engine speculates, and the names under which it serves."""

from __future__ import annotations

import json
from typing import Any

from backends.speculation import Method, method_named
from backends.validation import UsageError
from gateway.config.pool_text import Variable
from gateway.importer.configuration import Speculation
from gateway.importer.flags import Flags

K_VARIABLE = "NUM_SPECULATIVE_TOKENS"
"""Stands for k where vLLM reads it from the checkpoint."""

_CONFIG = ("--speculative-config", "-sc")
_SINGLE = {  # flags of their own, today's and those of vLLM before 0.9
    "--spec-method": "method",
    "--spec-model": "model",
    "--spec-tokens": "num_speculative_tokens",
    "--speculative-model": "model",
    "--num-speculative-tokens": "num_speculative_tokens",
    "--ngram-prompt-lookup-max": "prompt_lookup_max",
    "--ngram-prompt-lookup-min": "prompt_lookup_min",
    "--speculative-draft-tensor-parallel-size": "draft_tensor_parallel_size",
}
_BY_MODEL = (  # as vLLM tells the method from the draft's name
    ("eagle-", Method.EAGLE),
    ("eagle3", Method.EAGLE3),
    ("dflash", Method.DFLASH),
    ("dspark", Method.DSPARK),
    ("medusa", Method.MEDUSA),
)


def speculation_of(flags: Flags) -> Speculation:
    """Return how an engine with these flags speculates.

    Examples
    --------
    >>> speculation_of(Flags(["--spec-method", "ngram", "--spec-tokens", "4"]))
    Speculation(method=<Method.NGRAM: 'ngram'>, config={'num_speculative_tokens': 4}, note='')
    >>> speculation_of(Flags(["--max-model-len", "4096"])).method
    <Method.BASELINE: 'baseline'>
    """
    config: dict[str, Any] = {}
    for flag in _CONFIG:
        if (text := flags.text(flag)) is not None:
            config |= _object(flag, text)
        config |= {key: _value(value) for key, value in flags.below(flag).items()}
    for flag, key in _SINGLE.items():
        if (text := flags.text(flag)) is not None:
            config[key] = _value(text)
    return speculation(config)


def speculation(config: dict[str, Any]) -> Speculation:
    """Return how an engine with this `--speculative-config` speculates; an empty one is a baseline."""
    if not config:
        return Speculation(Method.BASELINE)
    config = dict(config)
    given, draft = str(config.pop("method", None) or ""), str(config.get("model") or "").lower()
    notes = []
    if not given and draft not in {"ngram", "[ngram]"}:
        notes.append("the method follows from the draft's name, as in vLLM")
    method = _method(given, draft)
    if method is None:
        note = f"the gateway does not know the method {given}: it is treated as a replica without speculation"
        return Speculation(Method.BASELINE, note=note)
    if method is Method.NGRAM and draft in {"ngram", "[ngram]"}:
        del config["model"]
    if method is not Method.SUFFIX and "num_speculative_tokens" not in config:
        config["num_speculative_tokens"] = Variable.of(K_VARIABLE)
        notes.append(f"vLLM reads num_speculative_tokens from the checkpoint, the gateway does not: set {K_VARIABLE}")
    return Speculation(method, config or None, "; ".join(notes))


def _method(given: str, draft: str) -> Method | None:
    if given or draft in {"ngram", "[ngram]"}:
        return method_named(given or draft)
    return next((method for part, method in _BY_MODEL if part in draft), Method.DRAFT_MODEL)


def _object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{flag}: expected a JSON object")
    return value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
