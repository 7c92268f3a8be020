"""One engine over every strategy."""
