"""One real engine at a time: the replicas of pool.yaml."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from backends.launch.supervisor import Launcher
from backends.speculation import Method
from gateway.config.load import load_pool
from gateway.service.replicas import plan

POOL = Path(__file__).with_name("pool.yaml")
METHODS = (Method.BASELINE, Method.NGRAM, Method.SUFFIX, Method.DRAFT_MODEL, Method.EAGLE)


def speculative_config(method: Method) -> Mapping[str, Any]:
    """Return the speculative config of a method's replica."""
    for backend in load_pool(POOL).models["tiny"].backends.values():
        if backend.method is method:
            config = backend.speculative_config
            return {} if config is None else config.model_dump(exclude_unset=True, exclude={"method"})
    raise KeyError(method)


@contextlib.asynccontextmanager
async def running(method: Method) -> AsyncIterator[str]:
    """Start the engine of a method, yield its URL when it answers, and stop it at the end.

    Raises
    ------
    LaunchError
        If the engine does not start.
    """
    settings = load_pool(POOL)
    model = settings.models["tiny"]
    alone = {name: each for name, each in model.backends.items() if each.method is method}
    settings = settings.model_copy(update={"models": {"tiny": model.model_copy(update={"backends": alone})}})
    with tempfile.TemporaryDirectory(prefix="vllm-cpu-") as folder:
        replicas = plan(settings, Path(folder))
        launcher = Launcher(replicas.launches)
        try:
            await launcher.start()
            await launcher.wait_ready()
            yield replicas.backends[0].url
        finally:
            await launcher.stop()
