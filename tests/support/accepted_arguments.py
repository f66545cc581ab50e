"""Whether a program accepts arguments: found out by its own parser or its help, without running it."""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer


def options(arguments: list[str]) -> set[str]:
    return {word.strip("[]").partition("=")[0] for word in arguments if re.match(r"\[?--\w", word)}


def help_of(program: str, arguments: list[str]) -> str:
    """Return the help of a program and of the subcommands used; nothing if a plugin that has them is not installed."""
    call, texts = [program], []
    all_of_curl = ["all"] if program == "curl" else []  # without it the text has the commonest options only
    for word in [*takewhile(re.compile("[a-z][a-z-]*$").match, arguments), "--help"]:
        done = subprocess.run([*call, "--help", *all_of_curl], capture_output=True, text=True, timeout=30, check=False)
        if done.returncode or done.stdout in texts:
            return ""
        texts.append(done.stdout)
        call.append(word)
    if program == "kubectl":  # its options for all subcommands are in none of their texts
        texts.append(
            subprocess.run([program, "options"], capture_output=True, text=True, timeout=30, check=True).stdout
        )
    return "".join(texts)


def source_of(module: str) -> str:
    """Return the source of a module that can be run, or of the `__main__` of a package."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    main = importlib.util.find_spec(f"{module}.__main__") if spec.submodule_search_locations else spec
    assert main is not None, f"{module} is no command"
    assert main.origin is not None
    return Path(main.origin).read_text()


def accept_typer(program: typer.Typer, arguments: list[str]) -> None:
    """Check that a program with subcommands accepts the arguments; nothing is run."""

    def disarm(command: Any) -> Any:
        if command.callback is not None:
            command.callback = lambda **_: None
        for parameter in command.params:
            parameter.callback = None  # prints and exits, or installs completion
        for child in getattr(command, "commands", {}).values():
            disarm(child)
        return command

    disarm(typer.main.get_command(program)).main(arguments, "gateway", standalone_mode=False)


class Accepted(Exception):  # noqa: N818 -- not an error
    """Raised when the arguments of a module are parsed."""


def accept_module(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a module accepts the arguments of `sys.argv`; it ends once they are parsed."""
    source = source_of(module)
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(*arguments: Any, **keywords: Any) -> None:
        parse(*arguments, **keywords)
        raise Accepted

    def accept_and_end(program: typer.Typer) -> None:
        accept_typer(program, sys.argv[1:])
        raise Accepted

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    monkeypatch.setattr(typer.Typer, "__call__", accept_and_end)
    if "parse_args" in source or "typer" in source:
        is_package = hasattr(sys.modules.get(module), "__path__")
        imported = f"{module}.__main__" if is_package else module
        monkeypatch.delitem(sys.modules, imported, raising=False)  # else runpy warns
        with pytest.raises(Accepted):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        assert not options(sys.argv[1:])
