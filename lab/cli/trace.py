"""`gateway trace show|convert|sample|anonymize` on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backends.validation import UsageError
from gateway.cli.extras import require
from gateway.cli.group import CommandGroup
from gateway.cli.output import say
from lab.options.shared import JsonFile, Strict, TraceFormat

if TYPE_CHECKING:
    from lab.trace.lines import BrokenLines
    from lab.trace.record import TraceRecord


class TextLeft(StrEnum):
    """What replaces the texts in an anonymized trace."""

    NONE = "none"
    HASHES = "hashes"


_OWN_FORMAT = "gateway"

TraceArgument = Annotated[Path, typer.Argument(metavar="TRACE", help="Trace file, or folder of trace files.")]
OutArgument = Annotated[
    Path, typer.Argument(metavar="OUT", help="Output file, compressed if it ends in .zst or .gz; - for stdout.")
]
OutFormat = Annotated[str, typer.Option("--to", metavar="gateway|mooncake|vllm", help="Format of OUT.")]

app = typer.Typer(
    cls=CommandGroup,
    help="Inspect, convert, sample and anonymize traces.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def show(
    trace: TraceArgument,
    *,
    trace_format: TraceFormat = None,
    strict: Strict = False,
    json: JsonFile = None,
) -> None:
    """Summarize a trace: number, lengths, times, kinds, acceptance.

    \b
    gateway trace show trace.jsonl.zst
    """
    with _broken_lines() as broken:
        from lab.trace.read import trace_files
        from lab.trace.show import print_summary
        from lab.trace.summary import summarize

        summary = summarize(_read(trace, trace_format, broken, strict=strict), trace_files(trace), broken)
        print_summary(summary)
        if json is not None:
            import orjson

            json.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


@app.command()
def convert(
    trace: TraceArgument,
    out: OutArgument,
    *,
    to: OutFormat = _OWN_FORMAT,
    trace_format: TraceFormat = None,
    in_order: Annotated[bool, typer.Option("--in-order", help="Sort requests by arrival.")] = False,
    strict: Strict = False,
) -> None:
    """Convert a trace to another format, or merge files into one.

    \b
    gateway trace convert recordings trace.jsonl.zst --in-order
    gateway trace convert trace.jsonl.zst out.jsonl --to mooncake
    """
    with _broken_lines() as broken:
        _write(trace, out, _read(trace, trace_format, broken, strict=strict, in_order=in_order), to)


@app.command()
def sample(
    trace: TraceArgument,
    out: OutArgument,
    *,
    share: Annotated[float | None, typer.Option(min=0, max=1, help="Share of the requests to take at random.")] = None,
    first: Annotated[int | None, typer.Option(min=1, help="Number of requests to take from the beginning.")] = None,
    sessions: Annotated[bool, typer.Option("--sessions", help="Take a share of the sessions instead.")] = False,
    start: Annotated[float, typer.Option(metavar="S", help="Start, in seconds after the first arrival.")] = 0.0,
    end: Annotated[
        float | None, typer.Option(metavar="S", help="End (exclusive), in seconds after the first arrival.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed takes the same sample.")] = 0,
    to: OutFormat = _OWN_FORMAT,
    trace_format: TraceFormat = None,
    strict: Strict = False,
) -> None:
    """Take a part of a trace: a share, a window, the first requests.

    \b
    gateway trace sample trace.jsonl.zst part.jsonl.zst --start 3600 --end 7200
    gateway trace sample trace.jsonl.zst part.jsonl.zst --share 0.1 --sessions
    """
    with _broken_lines() as broken:
        from itertools import islice

        from lab.trace.edits import share_of, window

        again = partial(_read, trace, trace_format, None, strict=strict)
        records = window(_read(trace, trace_format, broken, strict=strict), again, start, end)
        if share is not None:
            records = share_of(records, share, seed, sessions=sessions)
        _write(trace, out, islice(records, first), to)


@app.command()
def anonymize(
    trace: TraceArgument,
    out: OutArgument,
    *,
    text: Annotated[TextLeft, typer.Option(help="What to keep of texts.")] = TextLeft.NONE,
    salt: Annotated[
        str | None, typer.Option(envvar="GATEWAY_TRACE_SALT", help="Secret key of all hashes.  [default: random]")
    ] = None,
    trace_format: TraceFormat = None,
    strict: Strict = False,
) -> None:
    """Remove from a trace what identifies people.

    That is texts, ids, key names, sessions, templates and the date.

    \b
    gateway trace anonymize trace.jsonl.zst out.jsonl.zst --text hashes
    """
    with _broken_lines() as broken:
        from lab.trace.anonymize import Anonymizer
        from lab.trace.edits import first_arrival

        begun_at = first_arrival(_read(trace, trace_format, None, strict=strict))
        anonymizer = Anonymizer(salt, begun_at, with_hashes=text is TextLeft.HASHES)
        records = _read(trace, trace_format, broken, strict=strict)
        _write(trace, out, map(anonymizer.anonymized, records), _OWN_FORMAT)


@contextmanager
def _broken_lines() -> Iterator[BrokenLines]:
    """Yield a reporter that prints broken lines; at the end, print their number if not all were shown."""
    require("lab", "duckdb")
    from lab.trace.lines import BrokenLines

    broken = BrokenLines(lambda line: say(line, err=True))
    try:
        yield broken
    except ValueError as error:
        raise UsageError(str(error)) from error
    if broken.count > BrokenLines.SHOWN:
        say(f"{broken.count} broken lines skipped.", err=True)


def _read(
    trace: Path, kind: str | None, broken: BrokenLines | None, *, strict: bool, in_order: bool = False
) -> Iterator[TraceRecord]:
    """Yield the records; without `broken`, broken lines are not reported, as when a trace is read twice."""
    from lab.trace.lines import BrokenLines
    from lab.trace.read import read_trace

    report = BrokenLines(lambda _: None) if broken is None else broken
    return read_trace(trace, format=kind, strict=strict, in_order=in_order, report=report)


def _write(trace: Path, out: Path, records: Iterator[TraceRecord], to: str) -> None:
    from lab.trace.lines import TraceError
    from lab.trace.read import trace_files
    from lab.trace.write import write_trace

    if str(out) == "-":
        out = Path("/dev/stdout")
    elif out.exists() and any(out.samefile(file) for file in trace_files(trace)):
        raise TraceError(f"{out}: is being read; choose another output file")
    written, left_out = write_trace(out, records, to)
    say(f"{written} requests written to {out}", err=True)
    if left_out:
        say(f"{left_out} left out: they lack fields that {to} requires (docs/replay.md)", err=True)
