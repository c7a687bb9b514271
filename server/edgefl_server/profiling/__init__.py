"""Asking a fleet what a bundle costs."""
