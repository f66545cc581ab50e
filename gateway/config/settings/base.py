"""Types and the base class of all settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    SecretStr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from backends.validation import Issue, error_of, issues_of


def _checked_name(name: str) -> str:
    if not name or not all(character.isascii() and (character.isalnum() or character in "._:/-") for character in name):
        raise ValueError("a name is made of letters, digits and . _ : / -")
    return name


def none_if_empty(secret: Any) -> Any:
    """Return None for an empty secret: an unset variable with an empty default (`${KEY:-}`) means no key."""
    return None if secret == "" or (isinstance(secret, SecretStr) and not secret.get_secret_value()) else secret


def _as_text(value: Any) -> Any:
    # Users write numbers unquoted: `flags: [--max-model-len, 2048]`, `env: {OMP_NUM_THREADS: 1}`.
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Name = Annotated[str, AfterValidator(_checked_name)]
Secret = Annotated[SecretStr | None, BeforeValidator(none_if_empty)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Word = Annotated[str, BeforeValidator(_as_text), WithJsonSchema({"type": ["string", "number"]})]


class Settings(BaseModel):
    """Base of all settings: unknown keys are errors, and all errors are raised together, each with its path."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @classmethod
    def issues(cls, data: Mapping[str, Any]) -> Iterator[Issue]:
        """Yield conflicts between the keys of `data`, whose values may have the wrong types."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _all_at_once(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        conflicts = list(cls.issues(data)) if isinstance(data, Mapping) else []
        try:
            settings = handler(data)
        except ValidationError as error:
            raise error_of(cls.__name__, [*issues_of(error, cls), *conflicts]) from None
        if conflicts:
            raise error_of(cls.__name__, conflicts)
        return settings
