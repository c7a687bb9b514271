"""Capture of functions as graphs of core ops; a function that cannot be captured is refused with its module and line."""
