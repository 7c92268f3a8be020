"""What dsplan knows: probes, datasheets, micro-benchmarks and the benchmark database."""
