"""Figures of steps and of the machine while a run goes, and alerts where they look wrong."""
