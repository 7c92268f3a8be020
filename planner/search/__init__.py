"""From a request to ranked plans."""
