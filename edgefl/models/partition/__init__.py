"""Partitioning of a module: trace it, find points that one tensor crosses, and make a module of each subgraph."""
