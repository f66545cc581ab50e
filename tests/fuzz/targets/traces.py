"""Traces: any file is read as records and broken lines, or refused with a `TraceError`.

The first byte chooses format and compression, and whether the compressed file is cut short. The rest is the content.
A list of conversations is not compressed: DuckDB reads it, which takes a hundred times as long as the rest.
"""

from __future__ import annotations

import gzip
import math
import tempfile
from pathlib import Path

import zstandard

from lab.trace.decode import encode
from lab.trace.lines import BrokenLine, TraceError
from lab.trace.read import read_trace
from lab.trace.record import TraceRecord

_FORMATS = (
    *("gateway", "weka", "mooncake", "vllm", None, "sharegpt", "azure", "burstgpt", "bailian", None),
    *("aiperf", "litellm", "openai_batch", "messages"),
)
_PACKED = 4  # formats, from the first
_scratch = tempfile.TemporaryDirectory(prefix="fuzz-trace-")
_folder = Path(_scratch.name)
_file = _folder / "trace"


def fuzz_one(data: bytes) -> None:
    """Read a trace, and write and read its records again."""
    flags, content = (data[0], data[1:]) if data else (0, b"")
    if flags & 8:
        packed = gzip.compress(content, 1) if flags & 16 else zstandard.compress(content, 1)
        content = packed[: -(flags >> 5)] if flags >> 5 else packed
        format = _FORMATS[flags % _PACKED]
    else:
        format = _FORMATS[flags % len(_FORMATS)]
    _file.write_bytes(content)
    broken: list[BrokenLine] = []
    try:
        records = list(read_trace(_file, format=format, report=broken.append))
    except TraceError:
        return
    for record in records:
        _check(record)
    _file.write_bytes(b"".join(map(encode, records)))
    again = list(read_trace(_file, format="gateway", strict=True))
    assert list(map(encode, again)) == list(map(encode, records))


def _check(record: TraceRecord) -> None:
    assert record.prompt_tokens >= 0
    assert record.n >= 1
    for value in (record.arrived_at, record.ttft_s, record.e2e_s, record.temperature, record.propensity):
        assert value is None or math.isfinite(value)
