"""Sums of updates that no order of arrival can change, and what becomes of them."""
