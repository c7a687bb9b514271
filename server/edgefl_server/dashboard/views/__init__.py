"""Rows, tables, charts, pages and metrics of a fleet."""
