"""The search: ranked plans for a request."""
