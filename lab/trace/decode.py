"""Conversion between a trace record and its JSON object: liberal in reading, exact in writing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

import orjson

from gateway.recorder.packed import HASH_BITS, pack, unpack, unpack_version_2
from gateway.recorder.schema import VERSION, Hashing
from lab.trace.candidates import columns, read_candidates
from lab.trace.record import Speculation, TraceRecord
from lab.trace.values import (
    describe_type,
    read_count,
    read_method,
    read_not_negative,
    read_number,
    read_share,
    read_string,
    read_text,
    read_time,
    read_truth,
)
from policies.features.prompt import BYTES_PER_TOKEN, read_prompt

CountTokens = Callable[[str], int]

OUTCOME_FIELDS = frozenset(
    {
        "policy", "reason", "backend", "method", "propensity", "retried_from", "rescued_from", "rescued_at",
        "candidates", "status", "error", "ttft_s", "itl", "e2e_s", "queue_s", "spec", "cached_tokens",
    }
)  # fmt: skip
"""What became of a request, which is of no use to a replay: the decision, its candidates, and the answer's times."""


def estimate_tokens(text: str) -> int:
    """Return the estimated number of tokens of a text: a quarter of its UTF-8 bytes."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return max(1, round(size / BYTES_PER_TOKEN)) if size else 0


def decode(
    document: object, number: int, count_tokens: CountTokens = estimate_tokens, *, outcomes: bool = True
) -> TraceRecord:
    """Read a record. Unknown keys are ignored, and null counts as absent.

    Examples
    --------
    >>> record = decode({"prompt_tokens": 12, "method": "NGRAM", "unknown": 1}, 7)
    >>> record.id, record.prompt_tokens, record.method, record.output_tokens
    ('7', 12, 'ngram', None)
    """
    if not isinstance(document, dict):
        raise ValueError(f"expected an object, not {describe_type(document)}")  # noqa: TRY004 -- invalid data
    if isinstance(document.get("prompt"), list):  # the completions API accepts token ids as a prompt
        document = {"prompt_token_ids": document["prompt"]} | document | {"prompt": None}
    version = read_count(document.get("version") or VERSION)
    if version > VERSION:
        raise ValueError(f"written in version {version} of the schema; this reader supports up to {VERSION}")
    readers = _READERS[version == VERSION, outcomes]
    values: dict[str, Any] = {}
    for key, value in document.items():
        reader = readers.get(key)
        if reader is not None and value is not None:
            name, read = reader
            try:
                values[name] = read(value)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
    if "id" not in values:
        values["id"] = str(number)
    if "prompt_tokens" not in values:
        values["prompt_tokens"] = _prompt_tokens(document, values, count_tokens)
    if "output_tokens" not in values:
        if "output_token_ids" in values:
            values["output_tokens"] = len(values["output_token_ids"])
        elif "output" in values:
            values["output_tokens"] = count_tokens(values["output"])
    return TraceRecord(**values)


def encode(record: TraceRecord) -> bytes:
    r"""Return a record as one line of JSON with its newline; missing values are left out.

    Examples
    --------
    >>> encode(TraceRecord(id="a", prompt_tokens=12, output_tokens=3))
    b'{"version":3,"prompt_tokens":12,"id":"a","output_tokens":3}\n'
    """
    document: dict[str, Any] = {"version": VERSION, "prompt_tokens": record.prompt_tokens}
    for name, default in _DEFAULTS:
        value = getattr(record, name)
        if value is not None and value != default and name != "version":
            document[name] = value
    for name in ("prompt_hashes", "output_hashes"):
        hashes = document.get(name)
        if hashes and not max(hashes) >> HASH_BITS:  # hashes of versions 1 and 2 have more bits
            document[name] = pack(hashes)
    if record.candidates:
        document["candidates"] = columns(record.candidates)
    if record.spec is not None:
        document["spec"] = _sparse(asdict(record.spec))
    if record.acceptance:
        document["acceptance"] = {
            method: {"mean_acceptance_length": steps} if isinstance(steps, float | int) else steps
            for method, steps in record.acceptance.items()
        }
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


def _sparse(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if value is not None and value != ""}


def _prompt_tokens(document: dict[str, Any], values: Mapping[str, Any], count_tokens: CountTokens) -> int:
    if "prompt_token_ids" in values:
        return len(values["prompt_token_ids"])
    if "prompt" not in values and "messages" not in values:
        raise ValueError("has neither prompt_tokens nor a prompt")
    if count_tokens is estimate_tokens:
        return read_prompt(document).tokens
    return sum(map(count_tokens, read_prompt(document).pieces))


def _integers(value: object) -> list[int]:
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        return value
    raise ValueError("expected a list of whole numbers")


def _hashes(value: object) -> list[int]:
    return unpack(value) if isinstance(value, str) else _integers(value)


def _hashes_before_3(value: object) -> list[int]:
    return unpack_version_2(value) if isinstance(value, str) else _integers(value)


def _intervals(value: object) -> list[float]:
    if isinstance(value, list) and set(map(type, value)) <= {int, float}:
        return value
    return [read_not_negative(value)]


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(map(read_string, value))
    raise ValueError(f"expected a list, not {describe_type(value)}")


def _messages(value: object) -> list[dict[str, Any]]:
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return value
    raise ValueError("expected a list of messages")


def _error(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("code") or value.get("message") or value.get("type") or "error"
    if isinstance(value, bool):
        return "error" if value else ""
    return read_text(value)


def _acceptance(value: object) -> dict[str, list[int] | float]:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, not {describe_type(value)}")  # noqa: TRY004 -- invalid data
    by_method: dict[str, list[int] | float] = {}
    for method, entry in value.items():
        steps = entry.get("mean_acceptance_length") if isinstance(entry, dict) else entry
        if steps is None:
            continue
        try:
            by_method[read_method(method)] = _steps(steps) if isinstance(steps, list) else max(1.0, read_number(steps))
        except ValueError as error:
            raise ValueError(f"{method}: {error}") from None
    return by_method


def _steps(value: list[Any]) -> list[int]:
    if set(map(type, value)) <= {int} and (not value or min(value) >= 1):
        return value
    return [max(1, read_count(emitted)) for emitted in value]  # every step emits a token


def _speculation(value: object) -> Speculation:
    if not isinstance(value, dict):
        return Speculation(tokens_per_step=read_not_negative(value))
    return Speculation(
        _optional(read_count, _first(value, "drafted_tokens", "num_draft_tokens")),
        _optional(read_count, _first(value, "accepted_tokens", "num_accepted_draft_tokens")),
        _optional(read_count, _first(value, "drafting_steps", "num_spec_steps")),
        _optional(read_not_negative, _first(value, "tokens_per_step", "mean_acceptance_length")),
    )


def _hashing(value: object) -> Hashing:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, not {describe_type(value)}")  # noqa: TRY004 -- invalid data
    return Hashing(
        read_string(value.get("unit", "token")),
        max(1, read_count(value.get("ngram", 1))),
        read_string(value.get("salt", "")),
    )


def _optional(read: Callable[[object], Any], value: object) -> Any:
    return None if value is None else read(value)


def _first(document: Mapping[str, Any], *names: str) -> object:
    for name in names:
        if (value := document.get(name)) is not None:
            return value
    return None


_BY_TYPE: dict[str, Callable[[object], Any]] = {
    "str": read_text,
    "bool | None": read_truth,
    "float | None": read_not_negative,
    "int | None": read_count,
    "int": read_count,
    "Sequence[int]": _integers,
}
_BY_NAME: dict[str, Callable[[object], Any]] = {
    "prompt": read_string,
    "output": read_string,
    "n": lambda value: max(1, read_count(value)),
    "arrived_at": read_time,
    "method": read_method,
    "propensity": read_share,
    "baseline_only": _names,
    "candidates": read_candidates,
    "error": _error,
    "itl": _intervals,
    "spec": _speculation,
    "acceptance": _acceptance,
    "messages": _messages,
    "prompt_hashes": _hashes,
    "output_hashes": _hashes,
    "hashing": _hashing,
}
_ALL = {
    field.name: (field.name, _BY_NAME.get(field.name) or _BY_TYPE[str(field.type)]) for field in fields(TraceRecord)
}
_ALL["hash_ids"] = _ALL["prefix_blocks"]
_BEFORE_3 = _ALL | {name: (name, _hashes_before_3) for name in ("prompt_hashes", "output_hashes")}
_READERS = {
    (current, outcomes): {key: readers[key] for key in readers if outcomes or key not in OUTCOME_FIELDS}
    for current, readers in ((True, _ALL), (False, _BEFORE_3))
    for outcomes in (True, False)
}
"""By whether a record has the current version, and whether its outcome is read: name and reader of each key."""
_DEFAULTS = [
    (field.name, field.default if field.default is not MISSING else {})
    for field in fields(TraceRecord)
    if field.name not in {"candidates", "spec", "acceptance", "version"}
]
