"""`dsplan bench`: what this machine does in a second, measured and kept."""
