"""Optimizers and learning-rate schedules, by name and for every strategy."""
