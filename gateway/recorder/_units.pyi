from collections.abc import Callable

class Memory:
    """The hashes of units seen lately.

    Parameters
    ----------
    kinds
        Those of the 256 bytes, as `units.py` has them.
    secret
        32 bytes, which decide where units are remembered.
    """

    def __init__(self, kinds: bytes, secret: bytes) -> None: ...
    def pack(self, texts: tuple[str, ...], digest: Callable[[bytes], int], /) -> list[str]:
        """Return the hashes of the units of each text, packed.

        Parameters
        ----------
        digest
            Hashes a unit, to 24 bits, that is not remembered.

        Raises
        ------
        RuntimeError
            If another thread's call has not ended, or `digest` calls it.
        """
