"""`docs/bench.md` describes all options and report fields of `gateway bench`."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterator
from typing import get_args, get_type_hints

import click
import typer.main

from gateway.cli.app import app
from lab.bench.report import results
from tests.support.command import ROOT

TEXT = (ROOT / "docs" / "bench.md").read_text()
HELP_ONLY = {
    "--help",
    "--model",
    "--baseline",
    "--ignore-eos",
    "--header",
    "--api-key",
    "--timeout",
    "--endpoint",
}


def fields_of(kind: type) -> Iterator[str]:
    """Yield the names of the fields of a dataclass and of nested dataclasses."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        yield field.name
        hint = hints[field.name]
        inner = [hint, *get_args(hint)] if isinstance(hint, types.UnionType) or get_args(hint) else [hint]
        for one in inner:
            if dataclasses.is_dataclass(one) and isinstance(one, type):
                yield from fields_of(one)


def test_every_field_of_the_report_is_documented() -> None:
    document = TEXT.partition("## The JSON file")[2].partition("\n## ")[0]
    documented = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`[^`]+`", document))))
    assert set(fields_of(results.Report)) - documented == set()
    assert results.SCHEMA in document


def test_every_option_for_the_measurement_is_documented() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    options = {name for parameter in group.commands["bench"].params for name in parameter.opts}
    missing = {name for name in options if name not in TEXT}
    assert missing <= HELP_ONLY
    assert "--rate" in options
