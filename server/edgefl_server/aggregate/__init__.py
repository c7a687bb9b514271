"""Exact sums of updates, independent of their order of arrival, and the averages computed from them."""
