"""The arm of a backend: how it speculates."""

from __future__ import annotations

from backends.backend import Candidate
from backends.draft_schedule import effective_k


def arm_of(candidate: Candidate) -> str:
    """Return the arm of a backend, method:k; backends of one arm have the same acceptance.

    Examples
    --------
    >>> from backends.backend import Backend
    >>> from backends.speculation import Method
    >>> arm_of(Backend("a", "llama", Method.EAGLE3, "http://127.0.0.1:8001", num_speculative_tokens=3))
    'eagle3:3'
    """
    return f"{candidate.method.value}:{effective_k(candidate.method, candidate.num_speculative_tokens)}"
