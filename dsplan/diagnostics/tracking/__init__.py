"""Experiment trackers: a process beside the ranks of a run that hands them what the run writes."""
