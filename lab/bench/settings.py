"""Options of `gateway bench`, validated before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError

from backends.validation import Issue, UsageError, did_you_mean, issues_of
from gateway.config.settings.base import Count, Seconds, Settings
from lab.bench.prompts import KINDS

DEFAULT_REQUESTS = 100
_READABLE = "no such file, or not readable"


def _words(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _range(value: Any) -> Any:
    if isinstance(value, int):
        return value, value
    if isinstance(value, str):
        first, _, last = value.partition("-")
        return first, last or first
    return value


def _is_address(url: str) -> str:
    from lab.bench.targets import BaseUrl

    BaseUrl.parse(url.partition("=")[2] if _is_named(url) else url)
    return url


def _is_named(url: str) -> bool:
    return "=" in url.partition("://")[0] or url.partition("=")[2].startswith("unix:")


def _is_header(line: str) -> str:
    name, colon, value = line.partition(":")
    if not colon or not name.strip() or not line.isascii() or not line.isprintable() or " " in name.strip():
        raise ValueError("expected NAME: VALUE")
    return f"{name.strip().lower()}: {value.strip()}"


Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=1, le=1_000_000)]


class BenchSettings(Settings):
    """Settings of one benchmark, named like the options with `_` for `-`.

    Examples
    --------
    >>> settings = read_settings(url=("http://localhost:8000",), concurrency="1,4")
    >>> settings.concurrency, settings.count
    ((1, 4), 100)
    """

    # Endpoints, each `[NAME=]URL`, with or without `/v1`.
    url: tuple[Annotated[str, BeforeValidator(_is_address)], ...] = ()
    config: Path | None = None  # pool file whose replicas are measured in turn, instead of endpoints
    model: str | None = None  # model to request; with a pool, the model to measure (None for all)
    only: tuple[str, ...] = ()  # replicas of the pool to measure; empty for all
    # Name of the target that speedups are relative to; None for the first that does not speculate.
    baseline: str | None = None
    # Request rates of an open loop in requests per second, one run each.
    rate: Annotated[tuple[Rate, ...], BeforeValidator(_words)] = ()
    # Shape of the gamma distribution of the intervals between arrivals: 1 is Poisson, less is burstier.
    burstiness: Rate = 1.0
    # CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens, which gives arrivals, and lengths of synthetic
    # prompts. With `rate`, its times are stretched to that mean rate.
    trace: Path | None = None
    # Numbers of concurrent requests of a closed loop, one run each.
    concurrency: Annotated[tuple[Count, ...], BeforeValidator(_words)] = ()
    # num_requests, duration_s: maximum number of requests and of seconds; whichever ends first.
    num_requests: Count | None = None
    duration_s: Seconds | None = None
    warmup: Annotated[int, Field(ge=0)] = 0  # number of unmeasured requests before each run
    prompts: Literal[*KINDS] = "random"  # type: ignore[valid-type]
    # input_tokens, output_tokens: smallest and largest length to draw.
    input_tokens: Annotated[tuple[Tokens, Tokens], BeforeValidator(_range)] = (512, 512)
    output_tokens: Annotated[tuple[Tokens, Tokens] | None, BeforeValidator(_range)] = None
    dataset: Path | None = None
    tokenizer: Path | None = None
    endpoint: Literal["chat", "completions"] = "chat"
    temperature: Annotated[tuple[Annotated[float, Field(ge=0, le=2)], ...], BeforeValidator(_words)] = ()
    # Values of `num_speculative_tokens` with which each speculating replica of a pool is started in turn.
    k: Annotated[tuple[Count, ...], BeforeValidator(_words)] = ()
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=0)] = 0
    header: tuple[Annotated[str, BeforeValidator(_is_header)], ...] = ()
    api_key: SecretStr | None = None
    timeout_s: Seconds = 600.0  # seconds after which a request is aborted
    json_file: Path | None = None
    html_file: Path | None = None

    @property
    def count(self) -> int | None:
        """Maximum number of requests of a run; None if only time limits it."""
        if self.num_requests is None and self.duration_s is None and self.trace is None:
            return DEFAULT_REQUESTS
        return self.num_requests

    @property
    def request_headers(self) -> list[tuple[str, str]]:
        """Headers to add to every request."""
        pairs = [line.split(": ", 1) if ": " in line else [line.rstrip(":"), ""] for line in self.header]
        return [(name, value) for name, value in pairs]

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield conflicting options and missing files."""
        has = {name for name, value in data.items() if value not in (None, (), [], "")}
        if "url" in has and "config" in has:
            yield Issue(("config",), "given beside --url", "measure endpoints or a pool, not both")
        if not has & {"url", "config"}:
            yield Issue((), "nothing to measure", "give --url URL, or --config POOL")
        if "concurrency" in has and has & {"rate", "trace"}:
            other = "--rate" if "rate" in has else "--trace"
            yield Issue(("concurrency",), f"given beside {other}", "a loop is open or closed, not both")
        elif not has & {"concurrency", "rate", "trace"}:
            yield Issue((), "no load given", "give --rate R or --trace FILE (open loop), or --concurrency N (closed)")
        if data.get("burstiness", 1.0) != 1.0 and "rate" not in has:
            yield Issue(("burstiness",), "requires --rate")
        elif "burstiness" in has and data["burstiness"] != 1.0 and "trace" in has:
            yield Issue(("burstiness",), "given beside --trace", "a trace has its own arrivals")
        if "k" in has and "config" not in has:
            yield Issue(("k",), "requires --config", "k is set when a replica starts, so only for replicas of a pool")
        if "only" in has and "config" not in has:
            yield Issue(("only",), "requires --config")
        if "tokenizer" in has and "dataset" not in has:
            yield Issue(
                ("tokenizer",), "requires --dataset", "synthetic prompts are sized by the engine's token counts"
            )
        yield from _file_issues(data, has)
        yield from _range_issues(data)
        names = [url.partition("=")[0] for url in data.get("url") or () if _is_named(url)]
        for name in {name for name in names if names.count(name) > 1}:
            yield Issue(("url",), f"two endpoints are named {name}")


def _file_issues(data: Mapping[str, Any], has: set[str]) -> Iterator[Issue]:
    for name in ("config", "trace", "dataset", "tokenizer"):
        if name in has and not Path(data[name]).exists():
            yield Issue((name,), f"{data[name]}: {_READABLE}")
    for name in ("json_file", "html_file"):
        if name in has and not Path(data[name]).absolute().parent.is_dir():
            yield Issue((name,), f"{data[name]}: its folder does not exist")
        elif name in has and Path(data[name]).is_dir():
            yield Issue((name,), f"{data[name]}: is a folder", "give a file")


def _range_issues(data: Mapping[str, Any]) -> Iterator[Issue]:
    for name in ("input_tokens", "output_tokens"):
        value = data.get(name)
        first, dash, last = value.partition("-") if isinstance(value, str) else ("", "", "")
        if dash and first.strip().isdigit() and last.strip().isdigit() and int(first) > int(last):
            yield Issue((name,), f"the range is reversed: {value}")


def read_settings(**given: Any) -> BenchSettings:
    """Validate the options of the command line."""
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, float) and math.isnan(value):
            raise UsageError(f"{_option(name)}: not a number")
    try:
        return BenchSettings.model_validate(given)
    except ValidationError as error:
        lines = [_line(issue) for issue in issues_of(error, BenchSettings)]
        raise UsageError("\n".join(dict.fromkeys(lines))) from None


def named_url(url: str, number: int, total: int) -> tuple[str, str]:
    """Return name and address of `[NAME=]URL`; the default name is `endpoint`, numbered if there are several.

    Examples
    --------
    >>> named_url("mine=http://localhost:8000", 1, 1), named_url("http://localhost:8000", 2, 3)
    (('mine', 'http://localhost:8000'), ('endpoint-2', 'http://localhost:8000'))
    """
    if _is_named(url):
        name, _, address = url.partition("=")
        return name, address
    return ("endpoint" if total == 1 else f"endpoint-{number}"), url


def unknown(option: str, kind: str, name: str, known: list[str]) -> UsageError:
    """Return the error for a name that is not in `known`.

    Examples
    --------
    >>> print(unknown("--only", "backend", "hed", ["head", "plain"]))
    --only: no backend 'hed'; did you mean 'head'?
    """
    return UsageError(f"{option}: no {kind} '{name}'; {did_you_mean(name, known)}")


def _option(name: str) -> str:
    return "--" + name.removesuffix("_file").removesuffix("_s").replace("_", "-")


def _line(issue: Issue) -> str:
    prefix = f"{_option(str(issue.path[0]))}: " if issue.path else ""
    return f"{prefix}{issue.message}" + (f"; {issue.hint}" if issue.hint else "")
