"""What benchmarks share: workers, graphs for them, the machine, and the models that they measure."""
