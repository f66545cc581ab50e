"""Policies given on a command line: by name, as a settings file, or inline."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from backends.calibration.files import paths_from
from backends.files.regular import read_text
from backends.files.yaml import read_yaml
from backends.validation import UsageError, issues_of
from gateway.config.settings import ModelSettings, PolicyReference
from policies.policy import PolicySettings

_MOST_BYTES = 1 << 20


def with_seed(settings: PolicySettings, seed: int) -> PolicySettings:
    """Return the settings; if the policy is randomized and has no seed, fill in `seed`."""
    return settings.model_copy(update={"seed": seed}) if getattr(settings, "seed", 0) is None else settings


def named_reference(text: str, model: ModelSettings | None) -> tuple[str, PolicyReference]:
    """Return the title and the policy that one `--policy` names."""
    path = Path(text)
    if path.suffix in (".yaml", ".yml"):
        try:
            content = read_text(path, _MOST_BYTES)
        except OSError as error:
            raise UsageError(f"--policy {text}: cannot read the file: {error.strerror}") from None
        with paths_from(path.absolute().parent):
            return path.stem, _parsed(content, text)
    if text.lstrip().startswith("{"):
        reference = _parsed(text, text)
        return reference.name, reference
    if model is not None and model.policy.name == text:
        return text, model.policy
    return text, _validated({"name": text}, text)


def _parsed(content: str, given: str) -> PolicyReference:
    document = read_yaml(content, os.environ)
    for position, issue in document.issues:
        raise UsageError(f"--policy {given}: {position.line}:{position.column}: {issue.message}; {issue.hint}")
    data = document.data
    if isinstance(data, dict) and isinstance(data.get("policy"), dict):
        data = data["policy"]  # copied from a pool file with its key
    return _validated(data, given)


def _validated(data: object, given: str) -> PolicyReference:
    try:
        return PolicyReference.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(map(str, issues_of(error, PolicyReference)))
        raise UsageError(f"--policy {given}: {problems}") from None
