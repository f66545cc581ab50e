"""Optional dependencies of commands."""

from __future__ import annotations

from importlib.util import find_spec

from backends.validation import UsageError


def require(extra: str, *modules: str) -> None:
    """Raise `UsageError` unless the modules of an extra are installed; they are not imported.

    Examples
    --------
    >>> require("lab", "json")
    >>> require("lab", "no_such_module")
    Traceback (most recent call last):
        ...
    backends.validation.UsageError: needs no_such_module: pip install '.[lab]' in a checkout (deploy/README.md#install)
    """
    missing = [module for module in modules if not is_installed(module)]
    if missing:
        raise UsageError(
            f"needs {' and '.join(missing)}: pip install '.[{extra}]' in a checkout (deploy/README.md#install)"
        )


def is_installed(module: str) -> bool:
    """Return whether a module is installed; its extra or its room may be missing."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent package
        return False
