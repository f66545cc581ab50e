"""The reaper: a small process between the gateway and one engine, so that no process of the engine outlives it.

For Linux. Run as a script, `python reaper.py REPORT_FD ARGV...`; it imports only the standard library. It starts ARGV
in a new process group and, as a subreaper, becomes the parent of every process that the engine leaves behind, in
whatever group or session. The gateway controls it through its standard input:

- the byte ``t``: ask the engine to end (SIGTERM to its first process, which drains and ends its own children);
- end of file, which the death of the gateway causes too: kill all processes of the engine.

When the engine's first process ends, the others are killed. The reaper writes two lines to REPORT_FD: the engine's
process id and, when no process is left, the exit status (negative for a signal).
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
TRACKER_GRACE_S = 2.0


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl(2)."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def start(argv: list[str]) -> int:
    """Start the engine in a new process group and return its process id; it dies with this process."""
    engine = subprocess.Popen(  # noqa: S603 -- the operator's own command, from the pool file
        argv,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 -- there is one thread here
        restore_signals=True,
    )
    engine.returncode = 0  # Popen must not wait for it, since os.waitid does
    return engine.pid


def ended(engine: int) -> int | None:
    """Reap ended processes; return the exit status of the engine's first process, None while it runs.

    The first process itself stays a zombie, so that its id is not reused.
    """
    while (child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if child.si_pid == engine:
            return child.si_status if child.si_code == os.CLD_EXITED else -child.si_status
        os.waitpid(child.si_pid, 0)
    return None


def children() -> list[int]:
    """Return the process ids of this process's children, including adopted ones."""
    pids: list[int] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
            parent = stat.read().rpartition(")")[2].split()[1]  # the name before ")" may contain spaces
            if int(parent) == os.getpid():
                pids.append(int(name))
    return pids


def is_tracker(pid: int) -> bool:
    """Return whether a process is one of Python's resource trackers.

    A tracker ends by itself when the processes that it serves are dead, and then removes their shared memory.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return b"multiprocessing.resource_tracker" in command.read()
    except OSError:
        return False


def kill_all() -> None:
    """Kill all descendants and wait until none is left; resource trackers first get time to clean up."""
    grace_ends_s = time.monotonic() + TRACKER_GRACE_S
    while pids := children():  # this process adopts the children of those it kills
        for pid in pids:
            if time.monotonic() > grace_ends_s or not is_tracker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def watch(engine: int, wakeup: int) -> int:
    """Wait until the engine ends or is to be killed; return its exit status, negative for a signal."""
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
    """Run the engine, and kill its remaining processes when it ends."""
    report, argv = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(report, False)  # or the engine would hold it open
    # Only the gateway ends the reaper. SIG_IGN would be inherited by the engine, a handler is not.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, lambda *_: None)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        engine = start(argv)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(NOT_STARTED) from error
    with contextlib.suppress(BrokenPipeError):  # the gateway is gone; watch sees the end of file
        os.write(report, b"%d\n" % engine)
    status = watch(engine, wakeup)
    kill_all()
    with contextlib.suppress(BrokenPipeError):
        os.write(report, b"%d\n" % status)


if __name__ == "__main__":
    main()
