"""The command line: one module per command, registered in `app`."""
