"""Processes that benchmarks start and measure. Each imports only what its environment has and its measurement needs."""
