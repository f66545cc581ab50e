"""Makes commands from a dataclass of options, so that each option is written once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

Options = TypeVar("Options")


def command(run: Callable[[Options], int | None]) -> Callable[..., None]:
    """Return a typer command for a function that takes a dataclass; it exits with the status the function returns.

    Annotate the fields like parameters of a typer command; `tuple[T, ...]` makes an option repeatable.
    """
    [options, *_] = get_type_hints(run).values()
    hints = get_type_hints(options, include_extras=True)
    own = fields(options)

    def main(**given: Any) -> None:
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        # An exception removes the temporary files, which hold the trace.
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            raise typer.Exit(run(options(**{field.name: _value(field, values[field.name]) for field in own})) or 0)
        finally:
            signal.signal(signal.SIGTERM, before)

    main.__doc__ = run.__doc__
    main.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(
                field.name, Parameter.KEYWORD_ONLY, annotation=_listed(hints[field.name]), default=_default(field)
            )
            for field in own
        ]
    )
    main.__annotations__ = {}
    return main


def _listed(hint: Any) -> Any:
    """Return an annotation for typer, which takes repeatable options as lists."""
    if get_origin(hint) is not Annotated:
        return hint
    kind, *details = get_args(hint)
    if get_origin(kind) is tuple:
        kind = list[get_args(kind)[0]] | None  # type: ignore[misc]
    return Annotated[kind, *details]


def _default(field: Field[Any]) -> Any:
    if field.default is MISSING:
        return Parameter.empty
    return None if field.default == () else field.default


def _value(field: Field[Any], given: Any) -> Any:
    return () if given is None and field.default == () else given
