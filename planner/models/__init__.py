"""Facts of a model that the arithmetic needs, from a name, a config file, a size or a factory."""
