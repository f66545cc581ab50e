"""Prints the pinned packages that the extra `all` of the gateway installs, without the tools for development."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_LOCK = Path(__file__).parents[1] / "requirements.lock"


def shipped(name: str, extras: frozenset[str]) -> set[str]:
    """Return the names of a package's dependencies, direct and indirect, in this environment."""
    found: set[str] = set()
    pending = [(name, extras)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        package = pending.pop()
        if package in seen:
            continue
        seen.add(package)
        for text in metadata.requires(package[0]) or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in package[1] | {""}):
                dependency = canonicalize_name(requirement.name)
                found.add(dependency)
                pending.append((dependency, frozenset(requirement.extras)))
    return found - {name}


def main() -> int:
    """Print the packages; return 1 if one is not pinned."""
    pinned = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", _LOCK.read_text(), re.MULTILINE))
    versions = {canonicalize_name(name): version for name, version in pinned.items()}
    names = sorted(shipped("speculation-gateway", frozenset({"all"})))
    if missing := [name for name in names if name not in versions]:
        print(f"requirements.lock does not pin: {', '.join(missing)}", file=sys.stderr)
        return 1
    for name in names:
        print(f"{name}=={versions[name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
