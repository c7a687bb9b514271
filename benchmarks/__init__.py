"""Benchmarks of speed, memory and size, each on real processes, printed with the machine on which they ran."""
