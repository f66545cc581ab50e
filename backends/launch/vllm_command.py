"""The command line of `vllm serve`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from backends.speculation import Method


def vllm_serve_argv(
    *,
    command: Sequence[str],
    model: str,
    served_names: Sequence[str],
    host: str,
    port: int,
    method: Method,
    speculative_config: Mapping[str, Any],
    draft_depth: bool = False,
    flags: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the command line that serves `model` with `method` and reports what the gateway needs.

    Examples
    --------
    >>> argv = vllm_serve_argv(
    ...     command=("vllm", "serve"),
    ...     model="org/model",
    ...     served_names=("llama",),
    ...     host="127.0.0.1",
    ...     port=8001,
    ...     method=Method.NGRAM,
    ...     speculative_config={"num_speculative_tokens": 5},
    ... )
    >>> argv[argv.index("--speculative-config") + 1]
    '{"method": "ngram", "num_speculative_tokens": 5}'
    """
    defaults: dict[str, tuple[str, ...]] = {
        "--served-model-name": tuple(served_names),
        "--host": (host,),
        "--port": (str(port),),
        "--shutdown-timeout": ("20",),  # with the default of 0, SIGTERM cuts streams, and clients hang
        "--enable-request-id-headers": (),
        "--enable-per-request-metrics": (),
        "--enable-prompt-tokens-details": (),
    }
    if method is not Method.BASELINE:
        defaults["--speculative-config"] = (json.dumps({"method": method.value, **speculative_config}),)
        defaults["--per-request-spec-decode-metrics"] = ("summary",)  # a baseline fails to start with this flag
    if draft_depth:
        defaults["--scheduler-cls"] = ("vllm_draft_depth.Scheduler",)
    aliases = {"-sc": "--speculative-config"}
    own_names = {aliases.get(name, name) for name in (flag.partition("=")[0].replace("_", "-") for flag in flags)}
    added = [part for name, values in defaults.items() if name not in own_names for part in (name, *values)]
    return (*command, model, *added, *flags)


def flag_value(flags: Sequence[str] | None, flag: str) -> str | None:
    """Return the value of a flag given as `--flag value` or `--flag=value`; None if absent.

    Examples
    --------
    >>> flag_value(["--max-num-seqs", "64"], "--max-num-seqs"), flag_value(["--seed=1"], "--seed")
    ('64', '1')
    """
    flags = flags or ()
    for index, one in enumerate(flags):
        if one.startswith(f"{flag}="):
            return one.partition("=")[2]
        if one == flag and index + 1 < len(flags):
            return flags[index + 1]
    return None
