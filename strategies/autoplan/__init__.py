"""Which plan an engine runs: given, made on the spot, after running out of memory, or tuned."""
