"""What an exchange shows about its backends: which failures are strikes, and which are not.

A failure is evidence against a backend if another one serves the same request. If no other one
tries, a broken answer is evidence by itself. The pool counts the requests that a backend has failed, not the attempts.
"""

from __future__ import annotations

from typing import Final

from backends.backend import Backend
from backends.pool import Pool
from gateway.relay.context import Inbound

OVERLOADED: Final = 503
"""An engine that says so, and is at work, is not at fault, unless most of the others are at hand."""


class FirstFailure:
    """The failure of a first attempt."""

    __slots__ = ("backend", "is_reported", "message")

    def __init__(self, backend: Backend, message: str) -> None:
        self.backend = backend
        # What the backend did, if it is evidence against the backend once another one serves the request; else empty.
        self.message = message
        self.is_reported = False  # whether the pool knows of it


def strike(pool: Pool, backend: Backend, inbound: Inbound, message: str) -> None:
    """Report a failure that is evidence against a backend."""
    pool.report_strike(backend, request_hash(inbound), message)


def request_hash(inbound: Inbound) -> int:
    """Return a number by which the pool recognizes a request."""
    return hash((inbound.target, inbound.body))


def evidence_of_status(pool: Pool, backend: Backend, status: int) -> str:
    """Return the evidence in a 5xx status; empty if it is none."""
    is_evidence = status != OVERLOADED or not pool.is_at_work(backend) or pool.can_spare(backend)
    return f"answered {status} to a request that another served" if is_evidence else ""


def blame(pool: Pool, first: FirstFailure, inbound: Inbound) -> None:
    """Report the first failure of a request that another backend serves, once."""
    if first.message and not first.is_reported:
        first.is_reported = True
        strike(pool, first.backend, inbound, first.message)


def judge_error(pool: Pool, backend: Backend, inbound: Inbound, error_status: int, first: FirstFailure | None) -> None:
    """Report a stream that its engine has ended with an error, unless another backend has failed the request too."""
    if error_status != OVERLOADED and (first is None or not first.message):
        strike(pool, backend, inbound, "ended a stream with an error")
