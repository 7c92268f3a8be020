"""Choice of an engine's plan: given, made on the spot, after running out of memory, or tuned."""
