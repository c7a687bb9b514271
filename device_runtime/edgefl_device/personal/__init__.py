"""Personalization: the current model, from a broker or from files, adapted to this device's data."""
