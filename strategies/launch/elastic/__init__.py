"""Ranks on several nodes that may come and go."""
