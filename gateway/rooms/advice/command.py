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
    models = Admin(url, admin_key).get("/admin/advice")["models"]
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
        effect = "Added" if gain and gain["share"] < 0.0 else "Saved"
        parts.append(f"{effect} by speculation: {'; '.join(filter(None, (_share(gain) or 'not known', missing)))}.")
    parts += [*filter(None, [advised["comparing"]]), *advised["premises"]]
    for number, finding in enumerate(findings, 1):
        where, worth = finding["backend"], _share(finding["gain"]) or finding["worth"]
        parts += [f"{number}. {where}{where and ': '}{finding['title']}", *([f"   gain:     {worth}"] if worth else [])]
        parts += [f"   evidence: {finding['evidence']}", "   change:"]
        parts += [f"       {line}" for line in finding["change"].splitlines()]
    return "\n".join(parts)


def _share(gain: dict[str, Any] | None) -> str:
    """Return the share of the time that is saved, or if negative, the share that is added.

    Examples
    --------
    >>> _share({"share": -0.33, "low": -0.45, "high": 0.02, "of": "time per output token", "confidence": 0.95})
    '33% of the time per output token (95%: -2% to 45%)'
    """
    if gain is None:
        return ""
    sign = -1.0 if gain["share"] < 0.0 else 1.0
    low, high = sorted((sign * gain["low"], sign * gain["high"]))
    return f"{sign * gain['share']:.0%} of the {gain['of']} ({gain['confidence']:.0%}: {low:.0%} to {high:.0%})"


COMMANDS: Final = {"advise": advise}
