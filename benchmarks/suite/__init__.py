"""Architectures that others wrote, each tried as it comes: cut, exported, trained by each engine, compared with torch."""
