"""ModelFacts from a Hugging Face config."""
