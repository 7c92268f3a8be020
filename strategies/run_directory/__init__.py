"""Files of a run directory, by which launcher and ranks talk, and the words in them. No torch."""
