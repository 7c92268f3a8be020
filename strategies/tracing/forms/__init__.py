"""Memory forms, read off small symbolic steps."""
