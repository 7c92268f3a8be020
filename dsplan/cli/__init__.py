"""The command line: a file per command. A command module, and rich, are imported only when that command runs."""
