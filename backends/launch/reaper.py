"""A small process between the gateway and one engine that sees to it that nothing of the engine outlives it.

For Linux. Run as a file, `python reaper.py REPORT_FD ARGV...`, with the standard library alone. It starts ARGV
in a process group of its own and becomes the parent of every process that the engine leaves behind, whatever group or
session that has moved to. Its standard input is the gateway's hold on it:

- the byte ``t``: ask the engine to end (SIGTERM to its first process, which drains and ends its own children);
- end of file, which is also what the death of the gateway brings, however sudden: kill all of it.

When the engine's first process ends, for whatever reason, the rest is killed too. To REPORT_FD it writes the engine's
process id and, when nothing is left, the exit status (negative: the signal), a line each.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TERMINATE = b"t"
NOT_STARTED = 127
TRACKERS_S = 2.0


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl(2)."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def start(argv: list[str]) -> int:
    """Start the engine in a process group of its own and return its id; it dies with this process."""
    engine = subprocess.Popen(  # noqa: S603 -- the operator's own command, from the pool file
        argv,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 -- there is one thread here
        restore_signals=True,
    )
    engine.returncode = 0  # waited for below by os.waitid; Popen must not do it too
    return engine.pid


def ended(engine: int) -> int | None:
    """Reap what has ended, the engine's first process excepted; return that one's status if it has ended.

    That one stays a zombie, so that its id cannot be given to another process meanwhile.
    """
    while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if found.si_pid == engine:
            return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        os.waitpid(found.si_pid, 0)
    return None


def children() -> list[int]:
    """Return the ids of this process's children, adopted ones included."""
    found: list[int] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
            parent = stat.read().rpartition(")")[2].split()[1]  # the name before ")" may hold spaces
            if int(parent) == os.getpid():
                found.append(int(name))
    return found


def is_tracker(pid: int) -> bool:
    """Tell whether it is one of Python's resource trackers.

    Such a process ends by itself when those it works for are dead, and then removes the shared memory they left.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return b"multiprocessing.resource_tracker" in command.read()
    except OSError:
        return False


def kill_all() -> None:
    """Kill all descendants and wait until none is left; resource trackers are first given time to clean up."""
    trackers_until_s = time.monotonic() + TRACKERS_S
    while left := children():  # those of the killed come to this process, and are killed in their turn
        for child in left:
            if time.monotonic() > trackers_until_s or not is_tracker(child):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def watch(engine: int, wakeup: int) -> int:
    """Wait until the engine ends or must end; return its exit status, negative for a signal."""
    control = sys.stdin.fileno()
    while True:
        readable, _, _ = select.select([control, wakeup], [], [])
        if wakeup in readable:
            os.read(wakeup, 4096)
        if (status := ended(engine)) is not None:
            return status
        if control in readable:
            if os.read(control, 1) != TERMINATE:
                return -signal.SIGKILL
            os.kill(engine, signal.SIGTERM)


def main() -> None:
    """Start the engine, watch over it, leave nothing of it."""
    report, argv = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(report, False)  # else the engine would hold it open
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            ignored, lambda *_: None
        )  # the gateway says when to end; a handler is not inherited by the engine
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        engine = start(argv)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(NOT_STARTED) from error
    with contextlib.suppress(BrokenPipeError):  # the gateway is gone: its end of file is seen next
        os.write(report, b"%d\n" % engine)
    status = watch(engine, wakeup)
    kill_all()
    with contextlib.suppress(BrokenPipeError):
        os.write(report, b"%d\n" % status)


if __name__ == "__main__":
    main()
