"""Optional dependencies: which extra brings what a command needs."""

from __future__ import annotations

from importlib.util import find_spec

from backends.validation import UsageError

DISTRIBUTION = "speculation-gateway"


def require(command: str, extra: str, *modules: str) -> None:
    """Check that the modules of an extra are installed, without importing them.

    Parameters
    ----------
    command
        What needs them, as its user calls it.
    extra
        The extra of this distribution that brings them.

    Raises
    ------
    UsageError
        If one is missing; the message says what to install.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise UsageError(f"{command} needs {' and '.join(missing)}: pip install '{DISTRIBUTION}[{extra}]'")
