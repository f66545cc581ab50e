"""`gateway advise` on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
import typer

from gateway.cli.policy import DEFAULT_URL, Admin, AdminKey, Url
from lab.options.command import command
from lab.options.shared import JsonFile, PoolModel


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseOptions:
    """Options of the command line."""

    url: Url = DEFAULT_URL
    admin_key: AdminKey = ""
    model: PoolModel = None
    json_file: JsonFile = None


@command
def advise(options: AdviseOptions) -> None:
    """Recommend changes to a pool (k, methods, flags, memory), each with its expected gain and the lines to edit."""
    models = Admin(options.url, options.admin_key, None).get("/admin/advice")["models"]
    if options.model is not None:
        if options.model not in models:
            raise typer.BadParameter(f"no such model; there are: {', '.join(models)}", param_hint="--model")
        models = {options.model: models[options.model]}
    if options.json_file is not None:
        options.json_file.write_bytes(orjson.dumps({"models": models}, option=orjson.OPT_INDENT_2))
    typer.echo("\n\n".join(_text(name, advised) for name, advised in models.items()))


def _text(name: str, advised: dict[str, Any]) -> str:
    findings = advised["findings"]
    answers = ", ".join(f"{backend} {count:,}" for backend, count in advised["answers"].items())
    count = "nothing to advise" if not findings else f"{len(findings)} change{'s' if len(findings) > 1 else ''}"
    parts = [f"{name}: {count}. Answers with measured steps: {answers}."]
    if not advised["learns"]:
        parts.append("Its policy learns no step times; `gateway plan` compares methods and k on a recording.")
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
