"""Parameter counts of one kind of architecture per file; `planner.models.counting.count` picks the file."""
