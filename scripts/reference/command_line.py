"""The page of commands and options, which typer writes from the code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import entry_points

_PLAIN = {"TERM": "dumb", "COLUMNS": "200"}  # neither colours nor the width of a terminal
_HEAD = """\
# Command line

Every command, argument and option, as `gateway COMMAND --help` prints them. `scripts/docs` makes this page.

A command that is used wrongly says what would be right and exits with status 2. These need
the extra `[lab]` ([install](../../deploy/README.md#install)): {lab}.

Options and arguments of many commands, which name them only:

{shared}

## `gateway`
"""

_OPTION = re.compile(r"^\* (`[\w-]+).*\n", re.MULTILINE)
_MANY = 3  # commands with the same option; fewer say themselves what it does
_NAMES = re.compile(r"^\* `[\w-]+`(?:\n+\* `[\w-]+`)+$", re.MULTILINE)
_ALONE = re.compile(r"^(#+ `(.*)`\n(?:(?!#).*\n)*?)```sh\n\2\n```\n", re.MULTILINE)  # an example of only the name


def command_line_page() -> str:
    """Return the page."""
    command = [sys.executable, "-m", "typer", "gateway.cli.app", "utils", "docs", "--name", "gateway"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=_PLAIN)  # noqa: S603
    text = done.stdout.replace(" range>", ">")  # which the bounds say
    text = text.removeprefix("# `gateway`\n")
    text = re.sub(r"^\* `--help`: .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\x08\n((?:.+\n)+)", r"```sh\n\1```\n", text)  # the examples
    text = re.sub(r"\*\*(Options|Arguments)\*\*:\n\n", "", text)
    text = re.sub(r"\*\*Commands\*\*:\n\n(?:\*.*\n)+\n?", "", text)  # each has a section, with the whole of its text
    text = re.sub(r"\*\*Usage\*\*:\n\n```console\n.*\n```\n", "", text)  # what heading, example and arguments say
    text = _ALONE.sub(r"\1", text)
    counts = Counter(option[0] for option in _OPTION.finditer(text))
    shared: dict[str, str] = {}  # an option that takes several things is shared as the most common one
    for line, count in counts.most_common():
        if count >= _MANY and (option := _OPTION.match(line)):
            shared.setdefault(option[1], line)
    text = _OPTION.sub(lambda option: f"* {option[1]}`\n" if shared.get(option[1]) == option[0] else option[0], text)
    text = _NAMES.sub(lambda run: "* " + ", ".join(re.findall("`.+`", run[0])), text)
    lab = sorted(f"`{entry.name}`" for entry in entry_points(group="speculation_gateway.commands"))
    return (
        _HEAD.format(lab=", ".join(lab), shared="".join(shared.values()).rstrip())
        + re.sub(r"\n{3,}", "\n\n", text).rstrip()
        + "\n"
    )
