"""Rank side of a run that has to reach its last step: saves, resumes, stops in time, notices a hang."""
