"""What a configuration costs: bytes and seconds. What both models share lies here, once."""
