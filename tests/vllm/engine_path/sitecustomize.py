"""Has `vllm serve` fork its engine, which then imports nothing a second time: half of the CPU time of a start.

On the CPU vLLM starts it anew (`spawn`), for the sake of threads that are bound to cores, which those of tests are not.
"""

import multiprocessing
import sys
from multiprocessing.context import BaseContext

if sys.orig_argv[1:2] and sys.orig_argv[1].endswith("/vllm"):
    _get_context = multiprocessing.get_context

    def _forking(method: str | None = None) -> BaseContext:
        return _get_context("fork" if method == "spawn" else method)

    multiprocessing.get_context = _forking  # type: ignore[assignment]
