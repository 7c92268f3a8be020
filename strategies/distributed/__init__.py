"""Ranks: who this process is among its peers, and how they find each other and agree."""
