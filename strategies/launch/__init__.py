"""Starting a training script under a plan: recognition, local launcher, run session."""
