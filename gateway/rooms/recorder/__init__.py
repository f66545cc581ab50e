"""Recording: one JSON line per request, written by a thread off the request path.

The request path collects in `RequestNotes` what only it can observe, and appends it to a bounded queue. The thread
completes the records (docs/replay.md) and writes them as complete zstd frames to rotated files. Requests never wait for
it: if the queue or the disk is full, records are dropped and counted.
"""
