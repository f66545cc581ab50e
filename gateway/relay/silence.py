"""Decides when a backend that is silent on a request has failed it: pure rules, applied about twice a second."""

from __future__ import annotations

from typing import Final

from gateway.relay.failures import Failure, Step

STALL_S: Final = 3.0
STALL_GAPS: Final = 30.0
"""A pause within a stream is a stall if it exceeds both `STALL_S` and this many mean times between events."""
_DOWN_TIMEOUT_S: Final = 5.0
"""The longest silence of a backend that fails its health checks."""
_ALIVE_S: Final = 1.0
"""Seconds without any data after which a backend is silent on all requests."""


def is_stalled(silent_s: float, streamed_s: float, events: int, others_silent_s: float | None) -> bool:
    """Return whether a stream has stalled while its backend continues with others.

    Parameters
    ----------
    silent_s
        Seconds since the last bytes of the stream.
    streamed_s, events
        Seconds from its first bytes to its last, and its events in that time.
    others_silent_s
        Seconds since the backend sent anything; None if it has no other request.

    Examples
    --------
    >>> is_stalled(4.0, 10.0, 100, 0.1), is_stalled(4.0, 10.0, 100, 4.0), is_stalled(4.0, 10.0, 10, 0.1)
    (True, False, False)
    """
    if silent_s <= STALL_S or silent_s <= STALL_GAPS * (streamed_s / max(1, events)):
        return False
    return others_silent_s is None or others_silent_s < _ALIVE_S


def is_late_on_trial(silent_s: float, interval_s: float) -> bool:
    """Return whether a backend on trial has run out of time, including one probe."""
    return silent_s > _DOWN_TIMEOUT_S + interval_s


def failures_of(silent_s: float, limit_s: float, down: str | None, *, is_stalled: bool, is_late: bool) -> list[Failure]:
    """Return the failures that a silence may be, in order: each is tried if the ones before it have no effect.

    Parameters
    ----------
    limit_s
        Seconds for which the backend may be silent.
    down
        Why the backend is down; None if it is not.
    is_stalled, is_late
        Results of the functions of these names.

    Examples
    --------
    >>> [each.kind for each in failures_of(6.0, 60.0, "refused", is_stalled=False, is_late=False)]
    ['down', 'timeout']
    """
    if is_stalled:
        return [Failure("stalled", f"sent nothing for {silent_s:.1f} s of a stream")]
    found = [Failure("trial", f"sent nothing for {silent_s:.0f} s")] if is_late else []
    if down is not None:
        limit_s = min(limit_s, _DOWN_TIMEOUT_S)
    if silent_s > limit_s:
        if down is not None:
            found.append(Failure("down", down, otherwise=Step.TIME_OUT))
        found.append(Failure("timeout", f"sent nothing for {limit_s:g} s"))
    return found
