"""Writes traces, in this gateway's format or other tools'."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import orjson

from lab.trace.decode import encode
from lab.trace.lines import TraceError
from lab.trace.record import BLOCK_TOKENS, TraceRecord
from policies.features.prompt import read_prompt


class Writer(NamedTuple):
    """How to write requests in a format."""

    line_of: Callable[[TraceRecord], bytes | None]  # None if the record lacks what is needed
    needs: str = ""


def write_trace(path: Path, records: Iterable[TraceRecord], format: str = "gateway") -> tuple[int, int]:
    """Write records to a file, compressed according to its suffix (`.gz`, `.zst`), replacing it atomically."""
    if format not in WRITERS:
        raise ValueError(f"unknown format {format!r}; the formats are {', '.join(WRITERS)}")
    line_of, needs = WRITERS[format]
    written = left_out = 0
    # Write directly to devices, pipes and links: a link may be /dev/stdout, which root would replace for everyone.
    is_replaced = not path.is_symlink() and (path.is_file() or not path.exists())
    target = path.with_name(f".{path.name}.part") if is_replaced else path
    try:
        with _create(target, path.suffix) as file:
            for record in records:
                line = line_of(record)
                if line is None:
                    left_out += 1
                else:
                    file.write(line)
                    written += 1
        if not written:
            lacks = f"no request has what {format} needs: {needs}" if left_out else "there is no request for it"
            raise TraceError(f"{path}: not written, since {lacks}")
        if target != path:
            target.replace(path)
    except BrokenPipeError:  # the reader has enough
        raise
    except OSError as error:
        raise TraceError(f"{path}: cannot write the file: {error.strerror or error}") from None
    finally:
        if target != path:
            target.unlink(missing_ok=True)
    return written, left_out


@contextmanager
def _create(path: Path, suffix: str) -> Iterator[IO[bytes]]:
    with path.open("wb") as file:
        if suffix == ".gz":
            with gzip.open(file, "wb") as packed:
                yield cast(IO[bytes], packed)
        elif suffix == ".zst":
            import zstandard

            with zstandard.ZstdCompressor(write_checksum=True).stream_writer(file, closefd=False) as packing:
                yield cast(IO[bytes], packing)
        else:
            yield file


def _mooncake(record: TraceRecord) -> bytes | None:
    if record.arrived_at is None or record.output_tokens is None:
        return None
    if record.prefix_blocks and record.block_tokens != BLOCK_TOKENS:
        return None
    return _line(
        {
            "timestamp": round(record.arrived_at * 1000),
            "input_length": record.prompt_tokens,
            "output_length": record.output_tokens,
            "hash_ids": record.prefix_blocks,
        }
    )


def _vllm(record: TraceRecord) -> bytes | None:
    prompt = record.prompt or "\n".join(filter(None, read_prompt({"messages": list(record.messages)}).pieces))
    if not prompt:
        return None
    return _line({"prompt": prompt} | ({"output_tokens": record.output_tokens} if record.output_tokens else {}))


def _line(document: dict[str, Any]) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


WRITERS = {
    "gateway": Writer(encode),
    "mooncake": Writer(
        _mooncake, f"a time, a known length of the answer, and no prefix blocks but of {BLOCK_TOKENS} tokens"
    ),
    "vllm": Writer(_vllm, "a prompt"),
}
"""The formats to write."""
