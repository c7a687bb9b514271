"""Many devices in one process: what they say on the wire, without training anything (`python -m benchmarks load`)."""
