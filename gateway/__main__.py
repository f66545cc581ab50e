"""`python -m gateway`, the same as the command `gateway`."""

from gateway.cli.app import main

if __name__ == "__main__":  # not in the worker processes, which import this module too
    main()
