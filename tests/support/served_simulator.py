"""A simulated replica behind the command line of `vllm serve`; a script for `serve.command` of a pool file."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

REFUSED = "refused"
"""A value of `--speculative-config` that contains this ends the process, as a method that cannot be loaded does."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--served-model-name", nargs="+", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--speculative-config", type=json.loads, default={})
    parser.add_argument("--calibration", default="llama-3.1-8b-h100")
    parser.add_argument("--time-scale", type=float, default=1.0)
    options, _ = parser.parse_known_args()
    config = options.speculative_config
    if REFUSED in json.dumps(config):
        sys.exit("this speculative config is refused")
    replica = {
        "name": "served",
        "model": options.served_model_name[0],
        "served_model_names": options.served_model_name,
        "method": config.pop("method", "baseline"),
        "speculative_config": config,
        "calibration": options.calibration,
        "host": options.host,
        "port": options.port,
        "time_scale": options.time_scale,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump({"replicas": [replica]}, file)
    sys.argv = [sys.argv[0], file.name]
    from backends.simulator.__main__ import main as serve

    try:
        sys.exit(serve())
    finally:
        Path(file.name).unlink(missing_ok=True)


if __name__ == "__main__":
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    main()
