"""`gateway trace show|convert|sample|anonymize` on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from backends.validation import UsageError
from gateway.cli.extras import require
from gateway.cli.group import CommandGroup
from gateway.cli.output import say
from lab.options.command import command
from lab.options.shared import JsonFile, ReadOptions, finite

if TYPE_CHECKING:
    from lab.trace.lines import BrokenLines
    from lab.trace.record import TraceRecord


_OWN_FORMAT = "gateway"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OneTrace(ReadOptions):
    """A command's trace."""

    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Trace file, or folder of trace files.")]

    def again(self) -> Iterator[TraceRecord]:
        """Yield the records a second time, without reporting broken lines again."""
        return self.read(self.trace, lambda _: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions(OneTrace):
    """Options of `gateway trace show`."""

    json_file: JsonFile = None


@app.command("show")
@command
def show(options: ShowOptions) -> None:
    """Summarize a trace: number, lengths, times, kinds, acceptance.

    \b
    gateway trace show trace.jsonl.zst
    """
    with _broken_lines() as broken:
        from lab.report.terminal import write_json
        from lab.trace.read import trace_files
        from lab.trace.show import print_summary
        from lab.trace.summary import summarize

        summary = summarize(options.read(options.trace, broken), trace_files(options.trace), broken)
        print_summary(summary)
        write_json(options.json_file, summary)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions(OneTrace):
    """Options of `gateway trace convert`."""

    out: OutArgument
    to: OutFormat = _OWN_FORMAT
    in_order: Annotated[bool, typer.Option("--in-order", help="Sort requests by arrival.")] = False


@app.command("convert")
@command
def convert(options: ConvertOptions) -> None:
    """Convert a trace to another format, or merge files into one.

    \b
    gateway trace convert recordings trace.jsonl.zst --in-order
    gateway trace convert trace.jsonl.zst out.jsonl --to mooncake
    """
    with _broken_lines() as broken:
        records = options.read(options.trace, broken, in_order=options.in_order)
        _write(options.trace, options.out, records, options.to)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions(OneTrace):
    """Options of `gateway trace sample`."""

    out: OutArgument
    share: Annotated[
        float | None, typer.Option(min=0, max=1, callback=finite, help="Share of the requests to take at random.")
    ] = None
    first: Annotated[int | None, typer.Option(min=1, help="Number of requests to take from the beginning.")] = None
    sessions: Annotated[bool, typer.Option("--sessions", help="Take a share of the sessions instead.")] = False
    start: Annotated[
        float, typer.Option(metavar="S", callback=finite, help="Start, in seconds after the first arrival.")
    ] = 0.0
    end: Annotated[
        float | None,
        typer.Option(metavar="S", callback=finite, help="End (exclusive), in seconds after the first arrival."),
    ] = None
    seed: Annotated[int, typer.Option(help="Random seed; the same seed takes the same sample.")] = 0
    to: OutFormat = _OWN_FORMAT


@app.command("sample")
@command
def sample(options: SampleOptions) -> None:
    """Take part of a trace: a share, a window, the first requests.

    \b
    gateway trace sample trace.jsonl.zst part.jsonl.zst --start 3600 --end 7200
    gateway trace sample trace.jsonl.zst part.jsonl.zst --share 0.1 --sessions
    """
    with _broken_lines() as broken:
        from itertools import islice

        from lab.trace.edits import share_of, window

        records = window(options.read(options.trace, broken), options.again, options.start, options.end)
        if options.share is not None:
            records = share_of(records, options.share, options.seed, sessions=options.sessions)
        _write(options.trace, options.out, islice(records, options.first), options.to)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnonymizeOptions(OneTrace):
    """Options of `gateway trace anonymize`."""

    out: OutArgument
    text: Annotated[Literal["none", "hashes"], typer.Option(help="What to keep of texts.")] = "none"
    salt: Annotated[
        str | None, typer.Option(envvar="GATEWAY_TRACE_SALT", help="Secret key of all hashes.  [default: random]")
    ] = None


@app.command("anonymize")
@command
def anonymize(options: AnonymizeOptions) -> None:
    """Remove from a trace what identifies people.

    These are texts, ids, key names, sessions, templates and the date.

    \b
    gateway trace anonymize trace.jsonl.zst out.jsonl.zst --text hashes
    """
    with _broken_lines() as broken:
        from lab.trace.anonymize import Anonymizer
        from lab.trace.edits import first_arrival

        begun_at = first_arrival(options.again())
        anonymizer = Anonymizer(options.salt, begun_at, with_hashes=options.text == "hashes")
        records = options.read(options.trace, broken)
        _write(options.trace, options.out, map(anonymizer.anonymized, records), _OWN_FORMAT)


@contextmanager
def _broken_lines() -> Iterator[BrokenLines]:
    """Yield a reporter that prints broken lines; at the end, print their number if it did not show all."""
    require("lab", "duckdb")
    from lab.trace.lines import BrokenLines

    broken = BrokenLines(lambda line: say(line, err=True))
    try:
        yield broken
    except ValueError as error:
        raise UsageError(str(error)) from error
    if broken.count > BrokenLines.SHOWN:
        say(f"{broken.count} broken lines skipped.", err=True)


def _write(trace: Path, out: Path, records: Iterator[TraceRecord], to: str) -> None:
    from lab.trace.lines import TraceError
    from lab.trace.read import trace_files
    from lab.trace.write import WRITERS, write_trace

    if str(out) == "-":
        out = Path("/dev/stdout")
    elif out.exists() and any(out.samefile(file) for file in trace_files(trace)):
        raise TraceError(f"{out}: is being read; choose another output file")
    written, left_out = write_trace(out, records, to)
    say(f"{written} requests written to {out}", err=True)
    if left_out:
        say(f"{left_out} left out, which lack what {to} needs: {WRITERS[to].needs}", err=True)
