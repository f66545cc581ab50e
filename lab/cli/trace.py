"""`gateway trace show|convert|sample|anonymize` on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.group import CommandGroup

if TYPE_CHECKING:
    from lab.trace import BrokenLines, TraceRecord


class Format(StrEnum):
    """The names of `lab.trace.FORMATS`."""

    GATEWAY = "gateway"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    MOONCAKE = "mooncake"
    SHAREGPT = "sharegpt"
    VLLM = "vllm"


class Group(StrEnum):
    """What a sample takes whole."""

    REQUEST = "request"
    SESSION = "session"
    TEMPLATE = "template"


class TextLeft(StrEnum):
    """What an anonymous trace has in place of its texts."""

    NONE = "none"
    HASHES = "hashes"


TraceArgument = Annotated[Path, typer.Argument(metavar="TRACE", help="A file, or a folder of them.")]
OutArgument = Annotated[
    Path, typer.Argument(metavar="OUT", help="Written here, packed if it ends in .zst or .gz; - prints.")
]
FormatOption = Annotated[
    Format | None, typer.Option("--format", help="Format of TRACE.  [default: found out from its content]")
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Refuse a trace with a broken line.")]

app = typer.Typer(
    cls=CommandGroup,
    help="Look at traces, convert them, take samples, make them anonymous.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def show(
    trace: TraceArgument,
    *,
    format: FormatOption = None,
    strict: StrictOption = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures here too.")] = None,
) -> None:
    """Tell what is in a trace: how many requests, how long, how fast, of what kind, with what acceptance."""
    with _broken_lines() as broken:
        from lab.trace import trace_files
        from lab.trace.show import print_summary
        from lab.trace.statistics import summarize

        summary = summarize(_read(trace, format, broken, strict=strict), trace_files(trace), broken)
        print_summary(summary)
        if json is not None:
            import orjson

            json.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


@app.command()
def convert(
    trace: TraceArgument,
    out: OutArgument,
    *,
    to: Annotated[Format, typer.Option(help="Format of OUT.")] = Format.GATEWAY,
    format: FormatOption = None,
    in_order: Annotated[bool, typer.Option("--in-order", help="Sort by arrival.")] = False,
    model: Annotated[str, typer.Option(help="For requests without one.")] = "",
    workload: Annotated[str, typer.Option(help="For requests without one.")] = "",
    strict: StrictOption = False,
) -> None:
    """Write a trace in another format, or several files as one."""
    with _broken_lines() as broken:
        from lab.trace.edits import completed

        records = _read(trace, format, broken, strict=strict, in_order=in_order)
        _write(trace, out, completed(records, model, workload), to)


@app.command()
def sample(
    trace: TraceArgument,
    out: OutArgument,
    *,
    share: Annotated[float | None, typer.Option(min=0, max=1, help="Share of the requests to take.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Requests to take, at random.")] = None,
    first: Annotated[int | None, typer.Option(min=1, help="Requests to take, from the beginning.")] = None,
    whole: Annotated[Group, typer.Option(help="What is taken whole or not at all.")] = Group.REQUEST,
    start: Annotated[float, typer.Option(metavar="S", help="Seconds after the first arrival to begin at.")] = 0.0,
    end: Annotated[float | None, typer.Option(metavar="S", help="Seconds after it to end before.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is taken; the same takes the same.")] = 0,
    to: Annotated[Format, typer.Option(help="Format of OUT.")] = Format.GATEWAY,
    format: FormatOption = None,
    strict: StrictOption = False,
) -> None:
    """Take a part of a trace: a share, a number, or a window of time."""
    with _broken_lines() as broken:
        from lab.trace import BrokenLines, TraceError
        from lab.trace.sample import Part, part_of

        if sum(given is not None for given in (share, limit, first)) > 1:
            raise TraceError("give one of --share, --limit and --first")
        quiet = BrokenLines(lambda _: None)
        part = Part(share, limit, first, whole.value, start, end, seed)
        # It may have to be read twice; what is broken is told once.
        records = part_of(
            part,
            lambda: _read(trace, format, quiet, strict=strict),
            _read(trace, format, broken, strict=strict),
        )
        _write(trace, out, records, to)


@app.command()
def anonymize(
    trace: TraceArgument,
    out: OutArgument,
    *,
    text: Annotated[TextLeft, typer.Option(help="What is left of texts.")] = TextLeft.NONE,
    salt: Annotated[
        str | None, typer.Option(envvar="GATEWAY_TRACE_SALT", help="Secret of all hashes.  [default: a new one]")
    ] = None,
    ngram: Annotated[int, typer.Option(min=1, max=16, help="Tokens that each hash of a text stands for.")] = 1,
    keep_time: Annotated[bool, typer.Option("--keep-time", help="Do not shift the first arrival to 0.")] = False,
    format: FormatOption = None,
    strict: StrictOption = False,
) -> None:
    """Take out of a trace what tells of people: texts, ids, keys' names, sessions, templates, the date."""
    with _broken_lines() as broken:
        from lab.trace import BrokenLines
        from lab.trace.edits import Anonymizer, first_arrival

        quiet = BrokenLines(lambda _: None)
        begun_at = None if keep_time else first_arrival(_read(trace, format, quiet, strict=strict))
        anonymizer = Anonymizer(salt, begun_at, with_hashes=text is TextLeft.HASHES, ngram=ngram)
        records = _read(trace, format, broken, strict=strict)
        _write(trace, out, map(anonymizer.anonymized, records), Format.GATEWAY)


@contextmanager
def _broken_lines() -> Iterator[BrokenLines]:
    """Yield what prints broken lines, and print in the end how many there were beyond those shown."""
    from lab.trace import BrokenLines

    broken = BrokenLines(lambda line: typer.echo(line, err=True))
    yield broken
    if broken.count > BrokenLines.SAID:
        typer.echo(f"{broken.count} broken lines skipped.", err=True)


def _read(
    trace: Path, kind: Format | None, broken: BrokenLines, *, strict: bool, in_order: bool = False
) -> Iterator[TraceRecord]:
    from lab.trace import read_trace

    return read_trace(trace, format=kind and kind.value, strict=strict, in_order=in_order, report=broken)


def _write(trace: Path, out: Path, records: Iterator[TraceRecord], to: Format) -> None:
    from lab.trace import TraceError, trace_files, write_trace

    if str(out) == "-":
        out = Path("/dev/stdout")
    elif out.exists() and any(out.samefile(file) for file in trace_files(trace)):
        raise TraceError(f"{out}: is being read; write to another file")
    written, left_out = write_trace(out, records, to.value)
    typer.echo(f"{written} requests written to {out}", err=True)
    if left_out:
        typer.echo(f"{left_out} left out: they lack what {to.value} is made of (docs/trace.md)", err=True)
