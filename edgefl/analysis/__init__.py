"""Analyses of finished runs: heterogeneity, personalization, profiles, and their charts."""
