"""Entry point of `gateway` and of `python -m gateway`."""

import os
import sys


def main() -> None:
    """Run the command; Ctrl-C exits without a traceback, even during the imports."""
    for number in range(3):  # sockets that take the place of closed standard files end the process
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    try:
        from gateway.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":  # worker processes import this module too
    main()
