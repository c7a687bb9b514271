"""Benchmarks: speed, memory and size, each measured on real processes and printed with the machine it ran on."""
