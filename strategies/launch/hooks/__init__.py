"""Hooks, installed before a script runs, that give plans to those that use training libraries and not dsplan."""
