"""The laboratory's subcommands of `gateway`: one file for each."""
