"""Engines run the graphs of a bundle; one file per runtime."""
