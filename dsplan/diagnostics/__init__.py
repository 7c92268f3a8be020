"""Examining machines and runs: `dsplan doctor`, `dsplan bench`, experiment trackers. Training needs none of them."""
