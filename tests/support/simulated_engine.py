"""The simulator behind the command line of `vllm serve`: an engine that a gateway can start without vLLM."""

from __future__ import annotations

import argparse
import io
import json
import sys

from backends.simulator.__main__ import main

MISSING = "org/missing"
"""A draft model that is not there, with which an engine does not start."""


def settings(arguments: list[str]) -> dict[str, object]:
    """Return the simulator's settings for a command line of `vllm serve`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--port", type=int)
    parser.add_argument("--speculative-config", type=json.loads, default={})
    known, _ = parser.parse_known_args(arguments)
    config = known.speculative_config
    if config.pop("model", "") == MISSING:
        sys.exit(f"{MISSING} is no local folder and is not a valid model")
    replica = {
        "name": f"engine-{known.port}",
        "model": known.served_model_name[0],
        "served_model_names": known.served_model_name,
        "method": config.pop("method", "baseline"),
        "speculative_config": config,
        "calibration": "llama-3.1-8b-h100",
        "host": "127.0.0.1",
        "port": known.port,
        "seed": known.port,
    }
    return {"replicas": [replica]}


if __name__ == "__main__":
    sys.stdin = io.TextIOWrapper(io.BytesIO(json.dumps(settings(sys.argv[1:])).encode()))
    sys.argv[1:] = []
    sys.exit(main())
