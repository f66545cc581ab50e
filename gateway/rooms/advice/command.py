"""`gateway advise` on the command line."""

from __future__ import annotations

from typing import Any, Final

from gateway.cli.admin import DEFAULT_URL, Admin, AdminKey, Url
from gateway.cli.output import AsJson, say, say_json


def advise(*, json: AsJson = False, url: Url = DEFAULT_URL, admin_key: AdminKey = "") -> None:
    """Recommend changes to a running pool: k, methods, memory.

    Each comes with its gain and the lines to edit.

    \b
    gateway advise --url http://gateway:8080
    """
    models = Admin(url, admin_key, None).get("/admin/advice")["models"]
    if json:
        say_json({"models": models})
    else:
        say("\n\n".join(_text(name, advised) for name, advised in models.items()))


def _text(name: str, advised: dict[str, Any]) -> str:
    findings = advised["findings"]
    answers = ", ".join(f"{backend} {count:,}" for backend, count in advised["answers"].items())
    count = "nothing to advise" if not findings else f"{len(findings)} change{'s' if len(findings) > 1 else ''}"
    parts = [f"{name}: {count}. Answers with measured steps: {answers}."]
    if not advised["learns"]:
        parts.append("Its policy learns no step times: `gateway plan` judges methods and k by a recording.")
    else:
        gain, missing = advised["speculation"]["gain"], advised["speculation"]["missing"]
        parts.append(f"Saved by speculation: {'; '.join(filter(None, (_saved(gain) or 'not known', missing)))}.")
    parts += [*filter(None, [advised["comparing"]]), *advised["premises"]]
    for number, finding in enumerate(findings, 1):
        where, worth = finding["backend"], _saved(finding["gain"]) or finding["worth"]
        parts += [f"{number}. {where}{where and ': '}{finding['title']}", *([f"   gain:     {worth}"] if worth else [])]
        parts += [f"   evidence: {finding['evidence']}", "   change:"]
        parts += [f"       {line}" for line in finding["change"].splitlines()]
    return "\n".join(parts)


def _saved(gain: dict[str, Any] | None) -> str:
    if gain is None:
        return ""
    return f"{gain['share']:.0%} of the {gain['of']} (95%: {gain['low']:.0%} to {gain['high']:.0%})"


COMMANDS: Final = {"advise": advise}
