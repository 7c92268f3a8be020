"""Facts: probes, datasheets, micro-benchmarks and the benchmark database."""
