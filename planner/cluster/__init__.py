"""Clusters by where they come from: the catalogue (nodes), a file (cluster_file), this machine (probed)."""
