from collections.abc import Callable

class HashCache:
    """A cache of the hashes of recent units.

    Parameters
    ----------
    kinds
        The class of each of the 256 bytes, `units.KINDS`.
    secret
        32 bytes that determine the table slots of units.
    """

    def __init__(self, kinds: bytes, secret: bytes) -> None: ...
    def pack(self, texts: tuple[str, ...], digest: Callable[[bytes], int], /) -> list[str]:
        """Return the hashes of the units of each text, packed.

        Parameters
        ----------
        digest
            Returns the 24-bit hash of a unit that is not in the cache.

        Raises
        ------
        RuntimeError
            If a call in another thread has not ended, or `digest` calls this method.
        """
