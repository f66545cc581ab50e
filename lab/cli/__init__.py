"""The lab's subcommands of `gateway`, one file each."""
