"""`docs/bench.md` says all that the command takes and writes."""

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
TOLD_ELSEWHERE = {"--help", "--model", "--baseline", "--ignore-eos", "--header", "--api-key", "--timeout", "--endpoint"}


def fields_of(kind: type) -> Iterator[str]:
    """Yield the names of the fields of a dataclass and of those within it."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        yield field.name
        hint = hints[field.name]
        inner = [hint, *get_args(hint)] if isinstance(hint, types.UnionType) or get_args(hint) else [hint]
        for one in inner:
            if dataclasses.is_dataclass(one) and isinstance(one, type):
                yield from fields_of(one)


def test_every_field_of_the_document_is_told() -> None:
    document = TEXT.partition("## The JSON file")[2].partition("\n## ")[0]
    told = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`[^`]+`", document))))
    assert set(fields_of(results.Report)) - told == set()
    assert results.SCHEMA in document


def test_every_option_that_says_what_is_measured_is_told() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    options = {name for parameter in group.commands["bench"].params for name in parameter.opts}
    missing = {name for name in options if name not in TEXT}
    assert missing <= TOLD_ELSEWHERE
    assert "--rate" in options
