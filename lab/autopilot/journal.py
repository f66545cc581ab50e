"""What the autopilot has changed, in a file beside the pool file, so that the next run can judge and undo it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from backends.speculation import Method
from backends.validation import UsageError

Outcome = Literal["under way", "on trial", "kept", "undone", "failed"]
_KEPT = 200


class Speculation(BaseModel):
    """How a replica speculates."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Method
    config: dict[str, object] = {}

    def __str__(self) -> str:
        """Return method and config in one line."""
        shown = ", ".join(f"{key}: {value}" for key, value in self.config.items())
        return f"{self.method} {{{shown}}}" if shown else self.method.value


class Step(BaseModel):
    """One replica that changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str
    before: Speculation
    after: Speculation
    done: bool = False


class Change(BaseModel):
    """One change of the fleet: all replicas that a plan changes.

    Parameters
    ----------
    began_s, ended_s
        Unix time; `ended_s` is 0 until the last replica has changed.
    gain, low, high
        Share of the mean time to finish that it was expected to save, with its interval.
    undoes
        Whether it undoes the change before it; such a one is not on trial.
    note
        What came of it.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    began_s: float
    ended_s: float = 0.0
    steps: list[Step]
    gain: float
    low: float
    high: float
    outcome: Outcome = "under way"
    undoes: bool = False
    note: str = ""


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: Annotated[int, Field(ge=1, le=1)] = 1
    changes: list[Change] = []


@dataclass(slots=True)
class Journal:
    """The file.

    Attributes
    ----------
    changes
        The changes in order of time, at most the latest 200.
    """

    path: Path
    changes: list[Change] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Read the file; one that does not exist holds nothing.

        Raises
        ------
        UsageError
            If it cannot be read, or holds something else.
        """
        if not path.exists():
            return cls(path)
        try:
            return cls(path, _Document.model_validate_json(path.read_bytes()).changes)
        except (OSError, ValidationError) as error:
            raise UsageError(
                f"{path} is not a journal of `gateway autopilot`: {error}; name another with --state"
            ) from None

    def write(self) -> None:
        """Write the file, whole or not at all."""
        fresh = self.path.with_name(f".{self.path.name}.new")
        fresh.write_text(_Document(changes=self.changes[-_KEPT:]).model_dump_json(indent=1), encoding="utf-8")
        os.replace(fresh, self.path)

    def last(self, model: str) -> Change | None:
        """Return the last change of a model."""
        return next((change for change in reversed(self.changes) if change.model == model), None)

    def refuses(self, model: str, steps: Mapping[str, Speculation], now_s: float, forget_s: float) -> str | None:
        """Return why replicas should not change like this; None if nothing speaks against it."""
        for change in reversed(self.changes):
            if change.model != model or change.began_s < now_s - forget_s:
                continue
            wanted = sorted(str(one) for one in steps.values())
            if change.outcome == "undone" and wanted == sorted(str(step.after) for step in change.steps):
                return f"the same change was undone before: {change.note}"
            broken = [step.after for step in change.steps if not step.done]
            if change.outcome == "failed" and any(one in broken for one in steps.values()):
                return f"a replica did not start like this before: {change.note}"
        return None


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold the journal for as long as replicas may change.

    Raises
    ------
    UsageError
        If another process holds it.
    """
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another `gateway autopilot --apply` runs with {path}") from None
        yield
