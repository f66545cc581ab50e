"""The command `gateway`: one file for each subcommand."""
