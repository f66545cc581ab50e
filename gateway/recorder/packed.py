"""Hashes of 24 bits as a text: four characters each, which are the same for the same hash wherever it stands.

So what packs the file finds what repeats, as it does not where a hash begins at another bit of a character each time.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

HASH_BITS = 24
"""Of 36,538 words and marks of 1,435 real prompts and answers, 38 have another's hash; within one request, 3 times."""


def pack(hashes: npt.NDArray[np.uint32] | Sequence[int]) -> str:
    """Return hashes, each below 2^24, as base64 of three bytes each, the highest first.

    Raises
    ------
    OverflowError
        If one is larger, or negative.
    """
    numbers = np.asarray(hashes, ">u4")
    if len(numbers) and int(numbers.max()) >> HASH_BITS:
        raise OverflowError(f"expected hashes of {HASH_BITS} bits")
    data = numbers.view(np.uint8).reshape(-1, 4)[:, 1:].tobytes()
    return b2a_base64(data, newline=False).decode("ascii")


def unpack(text: str) -> list[int]:
    """Return the hashes of a text.

    Raises
    ------
    ValueError
        If it is no such text.
    """
    data = np.frombuffer(_bytes(text, 3), np.uint8).reshape(-1, 3)
    numbers: list[int] = (data @ np.array((1 << 16, 1 << 8, 1), np.uint32)).tolist()
    return numbers


def unpack_version_2(text: str) -> list[int]:
    """Return the hashes of a text as version 2 of the schema had them: of 32 bits, the lowest byte first.

    Raises
    ------
    ValueError
        If it is no such text.
    """
    numbers: list[int] = np.frombuffer(_bytes(text, 4), "<u4").tolist()
    return numbers


def _bytes(text: str, hash_bytes: int) -> bytes:
    try:
        data = a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise ValueError(f"expected hashes in base64: {error}") from None
    if len(data) % hash_bytes:
        raise ValueError(f"expected hashes of {hash_bytes} bytes each")
    return data
