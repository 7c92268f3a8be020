"""Changes inside a module or its gradients, whichever strategy runs."""
