"""What the arithmetic needs to know of a model, from a name, a config file, a size or a factory."""
