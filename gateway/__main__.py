"""Entry point of `gateway` and of `python -m gateway`."""

import sys


def main() -> None:
    """Run the command; Ctrl-C exits without a traceback, even during the imports."""
    try:
        from gateway.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":  # worker processes import this module too
    main()
