"""Has `vllm serve` do itself what it starts processes for that import vLLM again: most of the CPU time of a start.

On the CPU it starts its engine anew (`spawn`), for the sake of threads that are bound to cores, which those of tests
are not. It looks at each class of models in a process that ends, so that its own touches no GPU.
"""

import multiprocessing
import pickle
import subprocess
import sys
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

if sys.orig_argv[1:2] and sys.orig_argv[1].endswith("/vllm"):
    _get_context, _run = multiprocessing.get_context, subprocess.run

    def _forking(method: str | None = None) -> BaseContext:
        return _get_context("fork" if method == "spawn" else method)

    def _inspecting(*command: Any, **options: Any) -> Any:
        if not command or command[0][1:] != ["-m", "vllm.model_executor.models.registry"]:
            return _run(*command, **options)
        inspect, answer = pickle.loads(options["input"])
        Path(answer).write_bytes(pickle.dumps(inspect()))
        return subprocess.CompletedProcess(command[0], 0)

    multiprocessing.get_context = _forking  # type: ignore[assignment]
    subprocess.run = _inspecting
