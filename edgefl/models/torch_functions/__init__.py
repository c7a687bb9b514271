"""Replacements of torch functions in training graphs: rewritten, rejected, or computed from given random numbers."""
