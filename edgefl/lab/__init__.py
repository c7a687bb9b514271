"""A federation on one machine: data, processes, and what they say. Used by `edgefl run` and the benchmarks."""
