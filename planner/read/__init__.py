"""Readers of other trainers' configs and scripts: nothing in them is run, imported or downloaded."""
