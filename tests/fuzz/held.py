"""The memory that an object holds, found without knowing its attributes."""

from __future__ import annotations

import gc
import sys
from typing import Any

_MODULES = ("backends.http.", "gateway.http.", "httptools")


def held_bytes(root: Any, *, but: tuple[Any, ...] = ()) -> int:
    """Return the size of all data that an object refers to, directly or through containers and our own objects.

    Parameters
    ----------
    but
        Objects that are not followed, since others share them.
    """
    seen = {id(thing) for thing in but}
    left, total = [root], 0
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        kind = type(thing)
        if kind in (bytes, bytearray, str, int):
            total += sys.getsizeof(thing)
        elif (kind.__module__ == "builtins" and kind in (list, tuple, dict, set)) or kind.__module__ == "collections":
            total += sys.getsizeof(thing)
            left.extend(gc.get_referents(thing))
        elif kind.__module__.startswith(_MODULES):
            left.extend(gc.get_referents(thing))
    return total
