"""What the launcher and the ranks of a run hand each other: files of the run directory, and the words in them. No
torch."""
