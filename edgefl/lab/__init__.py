"""Federations on one machine: data, processes and events of a run. Used by `edgefl run` and the benchmarks."""
