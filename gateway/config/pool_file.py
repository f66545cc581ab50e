"""The whole pool file: its settings, with the sections of the rooms that exist."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from inspect import cleandoc
from pkgutil import iter_modules
from typing import Annotated, Any, Final

from pydantic import Field, create_model

from gateway import rooms
from gateway.config import settings
from gateway.config.settings.base import Name, Section


def _sections() -> Iterator[type[Section]]:
    """Yield the sections in the `settings.py` of each room."""
    for room in iter_modules(rooms.__path__):
        name = f"{rooms.__name__}.{room.name}.settings"
        if find_spec(name) is not None:
            for each in vars(import_module(name)).values():
                if isinstance(each, type) and issubclass(each, Section) and each is not Section:
                    yield each


def _fields(*, of_model: bool) -> dict[str, Any]:
    """Return type and default of the sections at the top level, or of those below a model, by key."""
    fields: dict[str, Any] = {}
    for each in _sections():
        if each.of_model is of_model:
            about = cleandoc(each.__doc__ or "").partition("\n\n")[0]
            fields[each.key] = (each, each()) if each.is_always else (each | None, Field(None, description=about))
    return fields


ModelSettings: Final = create_model(
    "ModelSettings",
    __base__=settings.ModelSettings,
    __module__=__name__,
    __doc__=settings.ModelSettings.__doc__,
    **_fields(of_model=True),
)
PoolFile: Final = create_model(
    "PoolFile",
    __base__=settings.PoolSettings,
    __module__=__name__,
    __doc__=settings.PoolSettings.__doc__,
    models=(Annotated[dict[Name, ModelSettings], Field(min_length=1)], ...),
    **_fields(of_model=False),
)
