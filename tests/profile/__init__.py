"""Profiles: measuring a bundle, attributing its nodes, and showing what was found."""
