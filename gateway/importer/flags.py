"""The flags of a command line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from backends.validation import UsageError

_FLAG = re.compile(r"--?[A-Za-z]")


class Flags:
    """The flags of a command, each with the values of all its uses; `--a_b` and `--a-b` are one flag.

    Examples
    --------
    >>> flags = Flags(["--served-model-name", "a", "b", "--spec_method=ngram", "--enforce-eager"])
    >>> flags.values("--served-model-name"), flags.text("--spec-method"), flags.names[-1]
    (['a', 'b'], 'ngram', '--enforce-eager')
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._values: dict[str, list[str]] = {}
        current: list[str] | None = None
        for word in words:
            if _FLAG.match(word):
                name, has_value, value = word.partition("=")
                name, *keys = name.split(".")
                name = name.replace("_", "-")
                current = self._values.setdefault(".".join([name, *keys]), [])
                if has_value:
                    current.append(value)
            elif current is not None:
                current.append(word)

    @property
    def names(self) -> tuple[str, ...]:
        """The flags that were given."""
        return tuple(self._values)

    def values(self, name: str) -> list[str]:
        """Return all values of a flag."""
        return self._values.get(name, [])

    def text(self, name: str) -> str | None:
        """Return the value of a flag; None without the flag."""
        values = self.values(name)
        if name in self._values and not values:
            raise UsageError(f"{name} needs a value")
        return values[-1] if values else None

    def below(self, name: str) -> dict[str, str]:
        """Return the values of `name.key` flags, by key."""
        start = f"{name}."
        return {
            key.removeprefix(start): each[-1] for key, each in self._values.items() if key.startswith(start) and each
        }
