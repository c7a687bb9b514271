"""Layers whose effects are visible, recurrent layers, norms, and initial values."""
