"""What is printed at start: the pool as a table, and how to talk to it."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from backends.speculation import Method, num_speculative_tokens
from gateway.config.settings import BackendSettings, PoolSettings

if TYPE_CHECKING:
    from rich.table import Table


def pool_table(settings: PoolSettings) -> Table:
    """Return the replicas, one a row: model, name, method, tokens drafted a step at most (k), place and weight."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("model", "backend", "method"):
        table.add_column(heading, no_wrap=True)
    table.add_column("k", justify="right")
    table.add_column("where", overflow="fold")
    table.add_column("weight", justify="right")
    for model, model_settings in settings.models.items():
        shown = model
        for name, backend in model_settings.backends.items():
            drafted = num_speculative_tokens(backend.method, backend.speculative_config)
            row = (shown, name, _method(backend), str(drafted or ""), where(backend), f"{backend.weight:g}")
            table.add_row(*map(Text, row))  # as they stand: `http://[fd00::1]` is no markup
            shown = ""
    return table


def where(backend: BackendSettings) -> str:
    """Return where a replica is, in a few words; a simulated one is always called so."""
    if backend.simulate is not None:
        return f"simulated ({backend.simulate.calibration})"
    if backend.serve is not None:
        return f"started here ({backend.serve.model})"
    return backend.url or ""


def start_lines(settings: PoolSettings, url: str, made_admin_key: str | None = None) -> list[str]:
    """Return the lines printed under the table once the gateway listens.

    Parameters
    ----------
    url
        Where it listens, `http://host:port`.
    made_admin_key
        The admin key made at start because none is set; it is shown, since nothing else tells it.
    """
    lines = [f"Listening at {url}  (OpenAI base_url: {url}/v1)"]
    simulated = [b for model in settings.models.values() for b in model.backends.values() if b.simulate is not None]
    if simulated:
        what = "replica is" if len(simulated) == 1 else "replicas are"
        lines.append(f"{len(simulated)} {what} simulated: made-up answers, as fast as published measurements say.")
    if not settings.keys:
        lines.append("Open: no keys are set, so whoever reaches this address may use it.")
    if made_admin_key is not None:
        lines.append(f"Admin key of this run: {made_admin_key}")
    lines += ["Try it:", "  " + try_line(settings, url)]
    return lines


def try_line(settings: PoolSettings, url: str) -> str:
    """Return a shell line that sends one streamed chat request to the first model."""
    model = next(iter(settings.models))
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Say hello."}]}
    key = " -H 'Authorization: Bearer YOUR-KEY'" if settings.keys else ""
    return (
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"
    )


def _method(backend: BackendSettings) -> str:
    config = backend.speculative_config
    is_parallel = backend.method is Method.DRAFT_MODEL and config is not None and config.parallel_drafting
    return f"{backend.method} (parallel)" if is_parallel else backend.method.value
