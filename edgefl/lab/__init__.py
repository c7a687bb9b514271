"""Federations on one machine: their data, processes and events. Used by `edgefl run` and the benchmarks."""
