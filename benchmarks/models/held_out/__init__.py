"""Architectures that had no part in the development of edgefl: a list written before the first of them was tried."""
