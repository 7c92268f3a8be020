"""DeepSpeed's ZeRO behind the calls of our engine."""
