"""The forms of activation memory, and what they come to for a job."""
