"""What the scripts of the clients share: where the gateway is, and how they report their cases.

A script runs in the environment of its client, without the gateway's packages. It prints a line of JSON with its
version, and one for each case.
"""

from __future__ import annotations

import json
import os
import re
import threading
import traceback
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version

from pydantic import BaseModel

URL = os.environ["CLIENTS_URL"]
"""Address of the gateway, without `/v1`."""

MODEL, KEY, LIMITED_KEY = (os.environ[f"CLIENTS_{name}"] for name in ("MODEL", "KEY", "LIMITED_KEY"))
"""A model, a key, and a key that allows one request at a time."""

WRONG_KEY = "wrong"
UNKNOWN_MODEL = "no-such-model"
HELLO = "Tell me about sequence types."
WEATHER = "What is the weather in Oslo, in celsius?"
TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class City(BaseModel):
    """A structured answer."""

    city: str


def check(condition: object, seen: object = "") -> None:
    """Raise `AssertionError` unless a condition holds; also under `python -O`."""
    if not condition:
        raise AssertionError(f"unexpected: {seen!r}")


def raises(error: type[Exception], text: str, ask: Callable[[], object]) -> None:
    """Check that a call raises an error that contains a text."""
    try:
        answer = ask()
    except error as raised:
        check(text in str(raised), raised)
    else:
        raise AssertionError(f"no {error.__name__} but {answer!r}")


def retries_after_429(ask: Callable[[], object]) -> None:
    """Check that two requests at once, with a key that allows one, are both answered, after one was refused."""
    refused, errors = _refused(), []

    def one() -> None:
        try:
            ask()
        except Exception as error:  # noqa: BLE001 -- raised below
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    check(_refused() > refused, "no request was refused")


def _refused() -> float:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{URL}/metrics") as page:
        counts = re.findall(rb'gateway_requests_total\{[^}]*outcome="refused"[^}]*\} (\S+)', page.read())
    return sum(map(float, counts))


Case = Callable[[], object]
Refusal = tuple[type[Exception], str]
"""An error, and a text that it contains."""


def run(
    package: str,
    ask: Callable[..., object],
    unknown_model: Refusal,
    wrong_key: Refusal,
    cases: Iterable[Case],
    *,
    has_chat: bool = True,
) -> None:
    """Run the cases of a client and print their results.

    Every client has `unknown_model`, `wrong_key`, `retry_after_429` and most have `chat`, by `ask(model=MODEL,
    key=KEY)`, which returns an answer that is not empty. `cases` are the others, by their names.
    """
    all_cases: dict[str, Case] = {
        **({"chat": lambda: check(ask())} if has_chat else {}),
        **{case.__name__: case for case in cases},
        "unknown_model": lambda: raises(*unknown_model, lambda: ask(model=UNKNOWN_MODEL)),
        "wrong_key": lambda: raises(*wrong_key, lambda: ask(key=WRONG_KEY)),
        "retry_after_429": lambda: retries_after_429(lambda: ask(key=LIMITED_KEY)),
    }
    report(package, all_cases)


def report(package: str, cases: Mapping[str, Case]) -> None:
    """Run cases and print their results."""
    print(json.dumps({"version": version(package)}), flush=True)
    for name, case in cases.items():
        error = None
        try:
            case()
        except Exception as raised:  # noqa: BLE001 -- reported
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"
        print(json.dumps({"case": name.replace("_", " "), "error": error}), flush=True)
