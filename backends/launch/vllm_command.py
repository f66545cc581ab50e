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
    flags: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the command line that serves `model` with `method`, measured the way the gateway wants it.

    Parameters
    ----------
    command
        Usually `("vllm", "serve")`.
    model
        A folder or a name that vLLM knows.
    served_names
        The names clients ask for.
    speculative_config
        What vLLM's `--speculative-config` takes; its `method` is added.
    flags
        The operator's own; they replace those that are added here.
    """
    ours: dict[str, tuple[str, ...]] = {
        "--served-model-name": tuple(served_names),
        "--host": (host,),
        "--port": (str(port),),
        "--shutdown-timeout": ("20",),  # with the default of 0 SIGTERM cuts streams and leaves their clients hanging
        "--enable-request-id-headers": (),
        "--enable-per-request-metrics": (),
    }
    if method is not Method.BASELINE:
        ours["--speculative-config"] = (json.dumps({"method": method.value, **speculative_config}),)
        ours["--per-request-spec-decode-metrics"] = ("summary",)  # a baseline server given this does not start
    aliases = {"-sc": "--speculative-config"}
    given = {aliases.get(name, name) for name in (flag.partition("=")[0].replace("_", "-") for flag in flags)}
    added = [part for name, values in ours.items() if name not in given for part in (name, *values)]
    return (*command, model, *added, *flags)
