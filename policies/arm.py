"""The arm of a backend: how it speculates."""

from __future__ import annotations

from backends.backend import Candidate
from backends.draft_schedule import effective_k
from backends.speculation import Method


def arm_of(candidate: Candidate) -> str:
    """Return the arm of a backend, method:k; backends of one arm have the same acceptance.

    Examples
    --------
    >>> from backends.backend import Backend
    >>> arm_of(Backend("a", "llama", Method.EAGLE3, "http://127.0.0.1:8001", num_speculative_tokens=3))
    'eagle3:3'
    """
    return arm_named(candidate.method, candidate.num_speculative_tokens)


def arm_named(method: Method, k: int) -> str:
    """Return the arm of backends that draft k tokens with a method.

    Examples
    --------
    >>> arm_named(Method.BASELINE, 0)
    'baseline:0'
    """
    return f"{method.value}:{effective_k(method, k)}"
