"""The strategies: each makes the engine that trains a model spread its way."""
