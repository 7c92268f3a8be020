"""Parameter counts of one kind of architecture per file; `planner.models.count` picks the file."""
