"""What is changed inside a module or its gradients, whichever strategy runs."""
