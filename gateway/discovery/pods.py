"""What the pods of an inference pool say of themselves, in labels and annotations: how they speculate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from pydantic import ValidationError

from backends.speculation import Method
from backends.validation import Issue, did_you_mean, issues_of
from gateway.config.settings import BackendSettings

PREFIX = "speculation.gateway/"
METHOD, TOKENS, CONFIG, WEIGHT = "method", "num-speculative-tokens", "speculative-config", "weight"
LIMIT, BEYOND, DEPTH = "drafter-limit", "beyond-drafter-limit", "draft-depth"
_KEYS = (METHOD, TOKENS, CONFIG, WEIGHT, LIMIT, BEYOND, DEPTH)
RANGE = "llm-d.ai/context-length-range"
"""The label of llm-d, whose `context-length-aware` scorer reads it."""


class LabelError(Exception):
    """Raised if the labels of a pod do not say how it speculates; the message says what would be right."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that takes requests."""

    address: str
    own: BackendSettings | None  # how it speculates; None if its labels do not say it
    problem: str = ""  # what is wrong with its labels

    @classmethod
    def of(cls, found: Mapping[str, Any], default: Mapping[str, Any]) -> Pod | None:
        """Return the pod of an object of the API server; None if it takes no requests: not ready, or terminating."""
        metadata, status = found["metadata"], found.get("status") or {}
        ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions") or ())
        if metadata.get("deletionTimestamp") or not ready or not status.get("podIP"):
            return None
        texts = (metadata.get("annotations") or {}) | (metadata.get("labels") or {})
        said = {key.removeprefix(PREFIX): text for key, text in texts.items() if key.startswith(PREFIX)}
        address = str(ip_address(status["podIP"]))
        try:
            return cls(address, settings_of(said, default, texts.get(RANGE)))
        except LabelError as error:
            return cls(address, None, str(error))


def settings_of(
    said: Mapping[str, str], default: Mapping[str, Any], context_range: str | None = None
) -> BackendSettings:
    """Return the settings of a replica whose pod has some labels, also llm-d's; their `url` means nothing.

    Examples
    --------
    >>> settings_of({"method": "eagle3", "num-speculative-tokens": "3"}, {}).method
    <Method.EAGLE3: 'eagle3'>
    """
    for key in said:
        if key not in _KEYS:
            raise LabelError(f"{PREFIX}{key}: no such label; {did_you_mean(key, _KEYS)}")
    data: dict[str, Any] = {"url": "http://pod", "context_range": context_range}
    if METHOD in said:
        data |= {"method": said[METHOD], "speculative_config": _config(said)}
    elif default and not {TOKENS, CONFIG} & said.keys():
        data |= default
    else:
        raise LabelError(f"it has no label {PREFIX}{METHOD}; set it to one of {', '.join(Method)}")
    if WEIGHT in said:
        data["weight"] = said[WEIGHT]
    if DEPTH in said:
        data["draft_depth"] = said[DEPTH]
    if LIMIT in said or BEYOND in said:
        data["drafter_limit"] = {"tokens": said.get(LIMIT), "beyond": said.get(BEYOND)}
    try:
        return BackendSettings.model_validate(data)
    except ValidationError as error:
        raise LabelError("; ".join(_text(issue) for issue in issues_of(error, BackendSettings))) from None


def _config(said: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the speculative config that two of the labels make."""
    if CONFIG not in said and TOKENS not in said:
        return None
    try:
        config = json.loads(said.get(CONFIG, "{}"))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise LabelError(f"{PREFIX}{CONFIG}: expected a JSON object, as of vLLM's --speculative-config")
    if TOKENS in said and str(config.setdefault("num_speculative_tokens", said[TOKENS])) != said[TOKENS]:
        raise LabelError(f"{PREFIX}{TOKENS}: differs from num_speculative_tokens in {PREFIX}{CONFIG}; remove one")
    return config


def _text(issue: Issue) -> str:
    """Return an issue of the settings in terms of the labels."""
    first, *rest = issue.path or ("",)
    if first == "context_range":
        return f"{RANGE}: expected tokens, such as 0-4096"
    key = {"method": METHOD, "weight": WEIGHT, "drafter_limit": LIMIT, "draft_depth": DEPTH}.get(str(first), CONFIG)
    if rest in (["num_speculative_tokens"], ["tokens"], ["beyond"]):
        key, rest = {"tokens": LIMIT, "beyond": BEYOND}.get(str(rest[0]), TOKENS), []
    path = "".join(f".{part}" for part in rest)
    return f"{PREFIX}{key}{path}: {issue.message}" + (f"; {issue.hint}" if issue.hint else "")
