"""The one way to split requests into parts, such as those a model is fitted to and those it is reported on."""

from __future__ import annotations

from hashlib import blake2b


def draw(key: str, salt: str | int = "") -> int:
    """Return a number below 2**64 that depends on the salt and the key alone, evenly distributed."""
    return int.from_bytes(blake2b(f"{salt}:{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def part_of(request_id: str, parts: int = 2, salt: str | int = "") -> int:
    """Return the part of a request, 0 to `parts` - 1: wherever and in whatever order it is met, the same one."""
    return draw(request_id, salt) % parts
