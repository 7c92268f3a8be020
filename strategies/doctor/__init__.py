"""What `dsplan doctor` looks at: this machine alone, and the machines of a job together."""
