"""Checks of `dsplan doctor`: this machine alone, and the machines of a job together."""
