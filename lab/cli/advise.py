"""`gateway advise` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.extras import require
from gateway.cli.policy import DEFAULT_URL, Admin, AdminKey, Url
from lab.cli.options import CalibrationOfAll, JsonFile, Limit, PoolModel, Strict, TraceFormat


def advise(
    trace: Annotated[
        list[Path] | None, typer.Argument(help="Traces in any format, instead of a running gateway.")
    ] = None,
    *,
    config: Annotated[Path | None, typer.Option(help="Pool file that served the trace.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = "",
    model: PoolModel = None,
    calibration: CalibrationOfAll = None,
    limit: Limit = None,
    trace_format: TraceFormat = None,
    strict: Strict = False,
    json: JsonFile = None,
) -> None:
    """Recommend changes to a pool (k, methods, flags, memory), each with its expected gain and the lines to edit."""
    if trace:
        require("lab", "scipy")
        from lab.advise.command import AdviseOptions, from_trace

        if config is None:
            raise typer.BadParameter("a trace needs the pool file that served it", param_hint="--config")
        models = from_trace(AdviseOptions(tuple(trace), config, model, calibration, limit, trace_format, strict))
    else:
        models = Admin(url, admin_key, None).get("/admin/advice")["models"]
        if model is not None and model not in models:
            raise typer.BadParameter(f"no such model; there are: {', '.join(models)}", param_hint="--model")
        models = {name: advised for name, advised in models.items() if model in (None, name)}
    if json is not None:
        import orjson

        json.write_bytes(orjson.dumps({"models": models}, option=orjson.OPT_INDENT_2))
    typer.echo("\n\n".join(_text(name, advised) for name, advised in models.items()))


def _text(name: str, advised: dict[str, Any]) -> str:
    findings = advised["findings"]
    answers = ", ".join(f"{backend} {count:,}" for backend, count in advised["answers"].items())
    count = "nothing to advise" if not findings else f"{len(findings)} change{'s' if len(findings) > 1 else ''}"
    parts = [f"{name}: {count}. Answers with measured steps: {answers}."]
    if not advised["learns"]:
        parts.append(
            "Its policy learns no step times; `gateway advise TRACE --config POOL` knows them from a recording."
        )
    for number, finding in enumerate(findings, 1):
        gain = finding["gain"]
        saved = "something known, not a time"
        if gain is not None:
            saved = f"{gain['share']:.0%} of the {gain['of']} (95%: {gain['low']:.0%} to {gain['high']:.0%})"
        change = "\n".join(f"       {line}" for line in finding["change"].splitlines())
        parts.append(
            f"{number}. {finding['backend']}: {finding['title']}\n   gain:     {saved}\n"
            f"   evidence: {finding['evidence']}\n   change:\n{change}"
        )
    return "\n".join(parts)
