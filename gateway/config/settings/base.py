"""Types and the base class of all settings."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, WithJsonSchema

from backends.validation import CheckedModel


def _checked_name(name: str) -> str:
    if not name or not all(character.isascii() and (character.isalnum() or character in "._:/-") for character in name):
        raise ValueError("a name is made of letters, digits and . _ : / -")
    return name


def none_if_empty(secret: Any) -> Any:
    """Return None for an empty secret: an unset variable with an empty default (`${KEY:-}`) means no key."""
    return None if secret == "" or (isinstance(secret, SecretStr) and not secret.get_secret_value()) else secret


def checked_secret(secret: SecretStr) -> SecretStr:
    """Return a secret that a header can carry; raise `ValueError` for others, without the secret."""
    text = secret.get_secret_value()
    if not (text.isascii() and text.isprintable() and text == text.strip()):
        raise ValueError("has a line break, a space at an end or a character beyond ASCII, which no header carries")
    return secret


def _as_text(value: Any) -> Any:
    # Users write numbers unquoted: `flags: [--max-model-len, 2048]`, `env: {OMP_NUM_THREADS: 1}`.
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Name = Annotated[str, AfterValidator(_checked_name)]
HeaderSecret = Annotated[SecretStr, AfterValidator(checked_secret)]
Secret = Annotated[HeaderSecret | None, BeforeValidator(none_if_empty)]
Seconds = Annotated[float, Field(gt=0)]
Milliseconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Word = Annotated[str, BeforeValidator(_as_text), WithJsonSchema({"type": ["string", "number"]})]


class Settings(CheckedModel):
    """Base of the settings of the pool file, whose docstrings become the descriptions in its schema."""


class Section(Settings):
    """A section of the pool file that a room defines in its `settings.py`.

    Attributes
    ----------
    key
        Its key in the pool file.
    of_model
        Whether it belongs below a model, not at the top level.
    is_always
        Whether it applies, with its defaults, even if the file omits it.
    """

    key: ClassVar[str]
    of_model: ClassVar[bool] = False
    is_always: ClassVar[bool] = False

    @classmethod
    def of(cls, settings: Settings) -> Self | None:
        """Return the section of a pool file, or of one of its models; None if it has none."""
        found: Self | None = getattr(settings, cls.key, None)
        return found
