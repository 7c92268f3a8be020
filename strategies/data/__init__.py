"""Data for data-parallel ranks."""
