"""Managed jobs of SkyPilot whose nodes run `dsplan run`: submitted from anywhere, started again where nodes go away."""
