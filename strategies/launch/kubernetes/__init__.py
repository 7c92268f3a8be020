"""Runs on a Kubernetes cluster: jobs whose pods run `dsplan run`, submitted and followed from anywhere."""
