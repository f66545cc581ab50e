"""The text of a pool file, with comments above the settings."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from backends.validation import UsageError, issues_of

_WIDTH = 110
_REFERENCE = re.compile(r"(?<!\$)\$\{(\w+)\}")


class Variable(str):
    """A reference to an environment variable, `${NAME}`; in any other text, `${` is escaped.

    Examples
    --------
    >>> Variable.of("VLLM_KEY")
    '${VLLM_KEY}'
    """

    __slots__ = ()

    @classmethod
    def of(cls, name: str) -> Variable:
        """Return the reference to the variable `name`."""
        return cls(f"${{{name}}}")


def pool_text(settings: Mapping[str, Any], comments: Sequence[str]) -> str:
    """Return the text of a pool file.

    Examples
    --------
    >>> print(pool_text({"server": {"host": "${a}", "port": Variable.of("PORT")}}, ["A pool."]), end="")
    # A pool.
    server:
      host: $${a}
      port: ${PORT}
    """
    above = [
        line
        for comment in comments
        for line in textwrap.wrap(
            comment,
            _WIDTH,
            initial_indent="# ",
            subsequent_indent="#   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]
    return "\n".join([*above, yaml.safe_dump(_plain(settings), width=_WIDTH, sort_keys=False, allow_unicode=True)])


def check_text(text: str, placeholders: Mapping[str, str]) -> None:
    """Check a pool file as `gateway check` does, with a value in place of each variable."""
    from gateway.config.settings import PoolSettings
    from gateway.config.yaml import read_yaml

    environ = {name: placeholders.get(name, f"{name}-value") for name in variables(text)}
    try:
        PoolSettings.model_validate(read_yaml(text, environ).data)
    except ValidationError as error:
        raise UsageError(
            "no valid pool file comes of it:\n"
            + "\n".join(
                f"  {'.'.join(map(str, each.path))}: {each.message}{f'; {each.hint}' if each.hint else ''}"
                for each in issues_of(error, PoolSettings)
            )
        ) from None


def variables(text: str) -> list[str]:
    r"""Return the names of the variables in a pool file, in order of appearance.

    Examples
    --------
    >>> variables("a: ${B}\nc: $${D} ${A} ${B}")
    ['B', 'A']
    """
    return list(dict.fromkeys(_REFERENCE.findall(text)))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Variable):
        return str(value)
    return value.replace("${", "$${") if isinstance(value, str) else value
