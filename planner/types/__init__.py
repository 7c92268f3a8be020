"""Values that the planner passes around: what is asked, on what, and what was decided."""
