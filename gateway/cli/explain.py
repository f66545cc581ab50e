"""`gateway explain`: which replica would take a request, and why."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any

import typer

from backends.validation import UsageError
from gateway.cli.admin import DEFAULT_URL, Admin, AdminKey, Url, failure
from gateway.cli.columns import columns, terminal_columns
from gateway.cli.given import read_given
from gateway.cli.output import AsJson, say, say_json

_MOST_BYTES = 64 << 20
_PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}


def explain(
    request: Annotated[str, typer.Argument(metavar="PROMPT|FILE", help="A prompt, a JSON file of a request, or -.")],
    *,
    model: Annotated[str | None, typer.Option(help="Model of a prompt, for a pool with several.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Temperature of a prompt.")] = None,
    path: Annotated[str | None, typer.Option(help="Path of the request.  [default: by its fields]")] = None,
    json: AsJson = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = "",
) -> None:
    """Show which replica would take a request, and why; nothing is sent.

    \b
    gateway explain "Say hello." --temperature 0
    gateway explain request.json
    """
    from gateway.dialects.json_body import decoded_body

    admin = Admin(url, admin_key)
    fields: Any = {"messages": [{"role": "user", "content": request}]}
    if request == "-" or Path(request).suffix == ".json":
        body = read_given(request, _MOST_BYTES)
        try:
            fields = decoded_body(body)
        except ValueError as error:
            raise UsageError(f"{request} is not JSON: {error}") from None
    else:
        fields |= {"model": model or _only_model(admin)}
        body = dumps(fields if temperature is None else fields | {"temperature": temperature}).encode()
    given = fields if isinstance(fields, dict) else {}  # the gateway reports what is wrong with anything else
    known = next((path for field, path in _PATHS.items() if field in given), "/v1/chat/completions")
    answer = admin.send("/admin/explain", body, path=path or known)
    lines = _lines(answer)
    if json:
        say_json(answer)
    else:
        say("\n".join(lines))


def _only_model(admin: Admin) -> str:
    models = list(admin.get("/admin/pool")["models"])
    if len(models) != 1:
        raise failure(f"Name the model with --model: {', '.join(models)}")
    return str(models[0])


def _lines(answer: dict[str, Any]) -> list[str]:
    asked, choice = answer["features"], answer["choice"]
    temperature = "" if asked["temperature"] is None else f", temperature {asked['temperature']:g}"
    read = f"Read as {asked['endpoint']} for {asked['model']}: about {asked['prompt_tokens']:,} prompt tokens"
    if unseen := asked["unseen"]:
        read += f", with {' and '.join(f'{name} ({count})' for name, count in unseen['parts'])}"
    if unseen and unseen["unknown"]:
        read += (
            f" (no engine has told yet how many tokens {' and '.join(unseen['unknown'])} is: it may be of any length)"
        )
    scored = [each for each in answer["candidates"] if each["score"] is not None]
    ranked = sorted(scored, key=lambda each: float(each["score"]))
    others = [each for each in answer["candidates"] if each["score"] is None]
    if choice is None:
        said = f"No replica would take this request: {answer['problem']}"
    else:
        chance = "" if choice["propensity"] >= 1 else f", with probability {choice['propensity']:.2f}"
        said = f"{choice['backend']} would take this request: {choice['policy']}, {choice['reason']}{chance}."
        if choice["policy"] == "learned" and len(ranked) > 1 and ranked[0]["backend"] == choice["backend"]:
            first, second = (float(each["score"]) for each in ranked[:2])
            said += f" It costs {first:.3f} s; the next, {ranked[1]['backend']}, {second - first:.3f} s more."
        if answer["is_compared"]:
            said += " But a comparison runs, which may send it elsewhere: `gateway compare status`."
    unit = "cost, s" if choice and choice["policy"] == "learned" else "score"
    rows = [["replica", "method", "state", "in flight", unit]]
    for each in (*ranked, *others):
        score = "-" if each["score"] is None else f"{each['score']:.3f}"
        rows.append([each["backend"], each["method"], each["state"], f"{each['in_flight']}", score])
    heading, *lines = columns(rows, left=3)
    width = terminal_columns()
    for number, each in enumerate((*ranked, *others)):
        lines[number] += "".join(f"\n    {line}" for line in wrap(each["note"], width - 4))
    return [said, f"{read}{temperature}.", "", heading, *lines]
