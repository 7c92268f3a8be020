"""The cost of a configuration: bytes and seconds. Both models share what lies here."""
