"""What a rank does for a run that has to reach its last step: saves, resumes, stops in time, and notices a hang."""
