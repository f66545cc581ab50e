"""The command `gateway`, one file per subcommand."""
