"""Looks of results: tables, bars and lines for a terminal, plain text for a pipe. Nothing here computes."""
