"""A record from the JSON object on its line, and back: liberal in what is read, exact in what is written."""

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
    kind_of,
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


def estimate_tokens(text: str) -> int:
    """Return about how many tokens a text has: a quarter of its UTF-8 bytes."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return max(1, round(size / BYTES_PER_TOKEN)) if size else 0


def decode(document: object, number: int, count_tokens: CountTokens = estimate_tokens) -> TraceRecord:
    """Read a record. Keys that are not known are passed over, and null counts as absent.

    Parameters
    ----------
    document
        The object of a line.
    number
        Of the line, counted from 1: the id of a record that has none.
    count_tokens
        Counts the tokens of a text where the record does not say how many there are.

    Raises
    ------
    ValueError
        If it is no object, a value has the wrong type, or it tells neither the length of its prompt nor its prompt.
    """
    if not isinstance(document, dict):
        raise ValueError(f"expected an object, not {kind_of(document)}")  # noqa: TRY004 -- the file's fault
    if isinstance(document.get("prompt"), list):  # of the completions API, which takes token ids in its place
        document = {"prompt_token_ids": document["prompt"]} | document | {"prompt": None}
    version = read_count(document.get("version") or VERSION)
    if version > VERSION:
        raise ValueError(f"written in version {version} of the schema; this reader knows {VERSION}")
    readers = _READERS if version == VERSION else _READERS_OF_2
    found: dict[str, Any] = {}
    for key, value in document.items():
        reader = readers.get(key)
        if reader is not None and value is not None:
            name, read = reader
            try:
                found[name] = read(value)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
    if "id" not in found:
        found["id"] = str(number)
    if "prompt_tokens" not in found:
        found["prompt_tokens"] = _prompt_tokens(document, found, count_tokens)
    if "output_tokens" not in found:
        if "output_token_ids" in found:
            found["output_tokens"] = len(found["output_token_ids"])
        elif "output" in found:
            found["output_tokens"] = count_tokens(found["output"])
    return TraceRecord(**found)


def encode(record: TraceRecord) -> bytes:
    """Write a record as one line of JSON, with its end of line; what it does not know is left out."""
    document: dict[str, Any] = {"version": VERSION, "prompt_tokens": record.prompt_tokens}
    for name, default in _DEFAULTS:
        value = getattr(record, name)
        if value is not None and value != default and name != "version":
            document[name] = value
    for name in ("prompt_hashes", "output_hashes"):
        hashes = document.get(name)
        if hashes and not max(hashes) >> HASH_BITS:  # those of versions 1 and 2 have more
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


def _sparse(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: what for name, what in told.items() if what is not None and what != ""}


def _prompt_tokens(document: dict[str, Any], found: Mapping[str, Any], count_tokens: CountTokens) -> int:
    if "prompt_token_ids" in found:
        return len(found["prompt_token_ids"])
    if "prompt" not in found and "messages" not in found:
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


def _hashes_of_2(value: object) -> list[int]:
    return unpack_version_2(value) if isinstance(value, str) else _integers(value)


def _intervals(value: object) -> list[float]:
    if isinstance(value, list) and set(map(type, value)) <= {int, float}:
        return value
    return [read_not_negative(value)]


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(map(read_string, value))
    raise ValueError(f"expected a list, not {kind_of(value)}")


def _messages(value: object) -> list[dict[str, Any]]:
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
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
        raise ValueError(f"expected an object, not {kind_of(value)}")  # noqa: TRY004 -- the file's fault
    found: dict[str, list[int] | float] = {}
    for method, told in value.items():
        if isinstance(told, dict):
            told = told.get("mean_acceptance_length")  # noqa: PLW2901 -- beside it stands what is not known here
        if told is None:
            continue
        try:
            found[read_method(method)] = _steps(told) if isinstance(told, list) else max(1.0, read_number(told))
        except ValueError as error:
            raise ValueError(f"{method}: {error}") from None
    return found


def _steps(value: list[Any]) -> list[int]:
    if not set(map(type, value)) <= {int}:
        return [max(1, read_count(one)) for one in value]
    if value and min(value) < 1:  # every step emits a token
        return [max(1, read_count(one)) for one in value]
    return value


def _speculation(value: object) -> Speculation:
    if not isinstance(value, dict):
        return Speculation(tokens_per_step=read_not_negative(value))
    return Speculation(
        _maybe(read_count, _first(value, "drafted_tokens", "num_draft_tokens")),
        _maybe(read_count, _first(value, "accepted_tokens", "num_accepted_draft_tokens")),
        _maybe(read_count, _first(value, "drafting_steps", "num_spec_steps")),
        _maybe(read_not_negative, _first(value, "tokens_per_step", "mean_acceptance_length")),
    )


def _hashing(value: object) -> Hashing:
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, not {kind_of(value)}")  # noqa: TRY004 -- the file's fault
    return Hashing(
        read_string(value.get("unit", "token")),
        max(1, read_count(value.get("ngram", 1))),
        read_string(value.get("salt", "")),
    )


def _maybe(read: Callable[[object], Any], value: object) -> Any:
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
_READERS = {one.name: (one.name, _BY_NAME.get(one.name) or _BY_TYPE[str(one.type)]) for one in fields(TraceRecord)}
_READERS["hash_ids"] = _READERS["prefix_blocks"]
_READERS_OF_2 = _READERS | {name: (name, _hashes_of_2) for name in ("prompt_hashes", "output_hashes")}
_DEFAULTS = [
    (one.name, one.default if one.default is not MISSING else {})
    for one in fields(TraceRecord)
    if one.name not in {"candidates", "spec", "acceptance", "version"}
]
