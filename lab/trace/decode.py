"""Converts between a trace record and its JSON object: liberal in reading, exact in writing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

import orjson

from gateway.rooms.recorder.packed import HASH_BITS, pack, unpack
from gateway.rooms.recorder.schema import VERSION, Hashing
from lab.trace.record import SpeculationRecord, TraceRecord
from lab.trace.values import (
    describe_type,
    read_count,
    read_method,
    read_not_negative,
    read_number,
    read_object,
    read_share,
    read_string,
    read_text,
    read_time,
    read_truth,
)
from policies.features.parts import PartTokens
from policies.features.prompt import BYTES_PER_TOKEN, Prompt, read_prompt


def estimate_tokens(text: str) -> int:
    """Estimate the tokens of a text: a quarter of its UTF-8 bytes."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return max(1, round(size / BYTES_PER_TOKEN)) if size else 0


def tokens_beside_text(prompt: Prompt) -> int:
    """Return the tokens that a gateway expects for images and the like before engines report any."""
    return PartTokens().unseen(prompt.parts, 0, "")[0] if prompt.parts else 0


def decode(document: object, number: int) -> TraceRecord:
    """Read a record. Unknown keys are ignored, and null counts as absent.

    Examples
    --------
    >>> record = decode({"prompt_tokens": 12, "method": "NGRAM", "unknown": 1}, 7)
    >>> record.id, record.prompt_tokens, record.method, record.output_tokens
    ('7', 12, 'ngram', None)
    """
    document = read_object(document)
    if isinstance(document.get("prompt"), list):  # the completions API accepts token ids as a prompt
        document = {"prompt_token_ids": document["prompt"]} | document | {"prompt": None}
    version = read_count(document.get("version") or VERSION)
    if version != VERSION:
        raise ValueError(f"written in version {version} of the schema; this reader supports version {VERSION}")
    values: dict[str, Any] = {}
    for key, value in document.items():
        reader = _READERS.get(key)
        if reader is not None and value is not None:
            name, read = reader
            try:
                values[name] = read(value)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
    if "id" not in values:
        values["id"] = str(number)
    if "prompt_tokens" not in values:
        values["prompt_tokens"] = _prompt_tokens(document, values)
    is_estimated = values.get("estimated", False)
    if "output_tokens" not in values:
        if "output_token_ids" in values:
            values["output_tokens"] = len(values["output_token_ids"])
        elif "output" in values:
            values["output_tokens"] = estimate_tokens(values["output"])
            is_estimated = True
    if is_estimated and "max_tokens" in values and "output_tokens" in values:  # an answer is no longer than requested
        values["output_tokens"] = min(values["output_tokens"], values["max_tokens"] * values.get("n", 1))
    return TraceRecord(**values)


def encode(record: TraceRecord) -> bytes:
    r"""Return a record as one line of JSON with its newline, without missing values.

    Examples
    --------
    >>> encode(TraceRecord(id="a", prompt_tokens=12, output_tokens=3))
    b'{"version":3,"prompt_tokens":12,"id":"a","output_tokens":3}\n'
    """
    document: dict[str, Any] = {"version": VERSION, "prompt_tokens": record.prompt_tokens}
    for name, default in _DEFAULTS:
        value = getattr(record, name)
        if value is not None and value != default:
            document[name] = value
    for name in ("prompt_hashes", "output_hashes"):
        hashes = document.get(name)
        if hashes and not max(hashes) >> HASH_BITS:  # other writers' hashes may have more bits
            document[name] = pack(hashes)
    if record.spec is not None:
        document["spec"] = {name: value for name, value in asdict(record.spec).items() if value is not None}
    if record.acceptance:
        document["acceptance"] = {
            method: {"mean_acceptance_length": steps} if isinstance(steps, float | int) else steps
            for method, steps in record.acceptance.items()
        }
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


def _prompt_tokens(document: dict[str, Any], values: Mapping[str, Any]) -> int:
    if "prompt_token_ids" in values:
        return len(values["prompt_token_ids"])
    if "prompt" not in values and "messages" not in values:
        raise ValueError("has neither prompt_tokens nor a prompt")
    prompt = read_prompt(document)
    return prompt.tokens + tokens_beside_text(prompt)


def _integers(value: object) -> list[int]:
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        return value
    raise ValueError("expected a list of whole numbers")


def _hashes(value: object) -> list[int]:
    return unpack(value) if isinstance(value, str) else _integers(value)


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


def _acceptance(value: object) -> dict[str, list[int] | float]:
    by_method: dict[str, list[int] | float] = {}
    for method, entry in read_object(value).items():
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


def _speculation(value: object) -> SpeculationRecord:
    given = read_object(value)
    known = {name: read(given[name]) for name, read in _SPECULATION.items() if given.get(name) is not None}
    return SpeculationRecord(**known)


def _hashing(value: object) -> Hashing:
    known = read_object(value)
    unit, ngram, salt = known.get("unit", "token"), known.get("ngram", 1), known.get("salt", "")
    return Hashing(read_string(unit), max(1, read_count(ngram)), read_string(salt))


_SPECULATION: dict[str, Callable[[object], Any]] = {
    "drafted_tokens": read_count,
    "accepted_tokens": read_count,
    "drafting_steps": read_count,
    "tokens_per_step": read_not_negative,
}
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
    "candidates": read_object,
    "itl": _intervals,
    "spec": _speculation,
    "acceptance": _acceptance,
    "messages": _messages,
    "prompt_hashes": _hashes,
    "output_hashes": _hashes,
    "hashing": _hashing,
}
_READERS = {
    field.name: (field.name, _BY_NAME.get(field.name) or _BY_TYPE[str(field.type)]) for field in fields(TraceRecord)
}
_READERS["hash_ids"] = _READERS["prefix_blocks"]
_DEFAULTS = [
    (field.name, field.default if field.default is not MISSING else {})
    for field in fields(TraceRecord)
    if field.name not in {"spec", "acceptance"}
]
