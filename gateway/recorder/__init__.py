"""Recording: one line a request, written beside the request path by a thread of its own.

The request path notes in `RequestNotes` what only it can see, and appends it to a bounded queue; the thread makes a
record of it (docs/trace.md), and writes records in whole zstd frames to files that it rotates. Nothing waits for it:
when the queue is full or the disk is, records are left out and counted.
"""

from gateway.recorder.recorder import Recorder, recorder_issue, with_salt
from gateway.recorder.take import FinishedRequest, RequestNotes

__all__ = ["FinishedRequest", "Recorder", "RequestNotes", "recorder_issue", "with_salt"]
