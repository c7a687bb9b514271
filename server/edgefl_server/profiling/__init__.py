"""Measurement of bundles on the devices of a fleet."""
